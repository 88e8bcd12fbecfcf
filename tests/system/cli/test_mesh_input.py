"""Meshes that cannot be: one line that names the field, before data or weights are touched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Ranks
from tests.support.recipes import write_recipe

CASES = pytest.mark.parametrize(
    ("fields", "told"),
    [
        pytest.param({"config_overrides": {"n_head": 3, "n_embd": 24}}, "3", id="heads"),
        pytest.param({"config_name": "opt", "config_overrides": {}}, "OPTForCausalLM has no", id="no plan"),
    ],
)


def write(folder: Path, fields: dict[str, Any]) -> str:
    return str(write_recipe(folder, tensor_parallel_size=2, **fields))


def errors_in(output: str) -> list[str]:
    return [line.removeprefix("error: ") for line in output.splitlines() if line.startswith("error: ")]


def call(arguments: list[str]) -> None:
    from stepmark.__main__ import main

    main(arguments)


@CASES
def test_ranks_refuse_a_mesh_that_cannot_be(ranks: Ranks, tmp_path: Path, fields: dict[str, Any], told: str) -> None:
    done = ranks.run(call, ["train", write(tmp_path, fields)], nproc=2)
    assert done.codes == [2, 2]
    output = "".join(done.logs)
    assert all(told in error for error in errors_in(output)), output
    assert errors_in(output)
    assert "tokenized" not in output


@pytest.mark.prove
@CASES
def test_a_mesh_that_cannot_be_is_refused_first(tmp_path: Path, fields: dict[str, Any], told: str) -> None:
    command = [sys.executable, "-m", "stepmark", "train", write(tmp_path, fields), "--nproc", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert done.returncode == 2
    (error,) = errors_in(done.stderr)
    assert told in error
    assert "tokenized" not in done.stderr
