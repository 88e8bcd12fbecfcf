"""Meshes that cannot be: one line that names the field, before data or weights are touched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.recipes import write_recipe


def train(folder: Path, *flags: str, **fields: Any) -> tuple[int, str, str]:
    """Exit code, the error and all that was said."""
    recipe = write_recipe(folder, **fields)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "stepmark", "train", str(recipe), *flags]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=180)
    errors = [line.removeprefix("error: ") for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    return done.returncode, errors[0], done.stderr


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tensor_parallel_size": 2, "config_overrides": {"n_head": 3, "n_embd": 24}}, "3"),
        pytest.param(
            {"tensor_parallel_size": 2, "config_name": "opt", "config_overrides": {}},
            "OPTForCausalLM has no",
            marks=pytest.mark.prove,
        ),
    ],
    ids=["heads", "no plan"],
)
def test_a_mesh_that_cannot_be_is_refused_first(tmp_path: Path, fields: dict[str, Any], told: str) -> None:
    code, error, output = train(tmp_path, "--nproc", "2", **fields)
    assert code == 2
    assert told in error
    assert "tokenized" not in output
