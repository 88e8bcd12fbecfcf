"""Addresses of object storage are refused wherever a path of this machine is meant."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepmark import Trainer, TrainingArguments
from stepmark.cli.main import run
from stepmark.config.recipe import read_recipe
from stepmark.errors import UsageError
from stepmark.filesystem.local_paths import is_address, local_path
from stepmark.recipe.used_recipe import used_values
from tests.support.programs import Blocks, tiny_model

ADDRESS = "s3://bucket/run"
FIELDS = ("--config_name", "gpt2", "--tokenizer_name", "bytes", "--dataset_name", "python-stdlib")
COMMANDS = (
    ["consolidate", "run", ADDRESS],
    ["export", "run", ADDRESS, "--to", "dcp"],
    ["import", "run", ADDRESS],
    ["report", "run", "--out", "gs://bucket/report.html"],
    ["init", "s3://bucket/recipe.yaml"],
    ["train", "--config_name", "gpt2", "--tokenizer_name", "bytes", "--train_file", ADDRESS],
    ["train", *FIELDS, "--prometheus_file", ADDRESS],
)


@pytest.mark.parametrize(
    ("path", "refused"),
    [
        ("s3://b/x", True),
        (Path("s3://b/x"), True),
        (["a", "gs://b"], True),
        ("hdfs://h:9000/x", True),
        ("abfs+ssl://x", True),
        ("/runs/first", False),
        ("runs/a:b/c", False),
        ("C:/runs", False),
        ("org/name", False),
        (True, False),
        (None, False),
    ],
)
def test_what_an_address_is(path: Any, refused: bool) -> None:
    assert is_address(path) is refused


def test_a_path_of_this_machine_is_a_path() -> None:
    assert local_path("a/b", "out") == Path("a/b")


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_refuse_them(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(words) == 2
    error = capsys.readouterr().err
    assert "should be a path of this machine" in error
    assert "s3://" in error or "gs://" in error
    assert len(error.strip().splitlines()) == 1
    assert os.listdir(tmp_path) == []


def _trainer() -> Trainer:
    args = TrainingArguments(output_dir="run", device="cpu", max_steps=1, disable_tqdm=True)
    return Trainer(tiny_model(), args, train_dataset=Blocks(4))


def test_a_model_is_written_to_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="should be a path of this machine"):
        _trainer().save_model(ADDRESS)
    assert not [name for name in os.listdir(tmp_path) if ":" in name]


def test_a_run_in_a_bucket_works_in_a_folder_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPMARK_CACHE", str(tmp_path))
    args = TrainingArguments(output_dir="s3://bucket/team/run/")
    assert (args.output_dir, args.mirror_to) == (f"{tmp_path}/runs/s3/bucket/team/run", "s3://bucket/team/run/")
    recipe = read_recipe(
        None, {"config_name": "gpt2", "tokenizer_name": "bytes", "dataset_name": "python-stdlib", "output_dir": ADDRESS}
    )
    assert used_values(recipe)["output_dir"] == ADDRESS
    assert "mirror_to" not in used_values(recipe)
    beside = replace(recipe.training, output_dir="other", mirror_to=ADDRESS)
    assert (beside.output_dir, beside.mirror_to) == (os.path.abspath("other"), ADDRESS)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"output_dir": "hdfs://host/run"}, "output_dir: should be a path, s3://, gs:// or az://"),
        ({"mirror_to": "runs/first"}, "mirror_to: should be an address: s3://, gs:// or az://"),
        ({"mirror_to": "s3://b/1", "output_dir": "s3://b/2"}, "output_dir and mirror_to: each names a place"),
    ],
)
def test_other_places_of_a_run_are_refused(fields: dict[str, str], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        TrainingArguments(**fields)


def test_a_cache_of_compiled_graphs_may_be_in_a_bucket() -> None:
    assert TrainingArguments(output_dir="run", compile_cache="s3://bucket/graphs").compile_cache == "s3://bucket/graphs"
