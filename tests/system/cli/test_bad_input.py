"""What a user gets for a call that cannot work: one line that says what, where and what to do, and nothing lost.

The calls are made in this process, as `python -m stepmark` makes them; the last test makes some as a user does.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from stepmark.cli.main import run
from stepmark.trainer.run_folder import output_folder as output_module
from stepmark.trainer.run_folder.run_log import read_metrics
from tests.support import commands
from tests.support.corruption import flip_bit
from tests.support.ranks import Ranks
from tests.support.recipes import TINY, write_recipe, write_text
from tests.support.run_folders import read_status


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tokens are made once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEPMARK_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


class Told(NamedTuple):
    code: int
    error: str  # the line, without "error: "
    output: str


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., Told]:
    def call(*arguments: str) -> Told:
        capsys.readouterr()
        with redirect_stderr(sys.stderr):  # each command replaces it by a console of its own
            code = run(["train", *arguments])
        captured = capsys.readouterr()
        lines = [line for line in captured.err.splitlines() if line.startswith("error: ")]
        assert "Traceback" not in captured.err
        assert len(lines) == (1 if code else 0), captured.err
        assert not lines or captured.err.endswith(f"{lines[0]}\n")
        return Told(code, lines[0].removeprefix("error: ") if lines else "", captured.err)

    return call


def contents(folder: Path, without: str = "failures") -> dict[str, str]:
    """Every file below the folder, with a digest of its bytes; the engine's coordination and tracebacks apart."""
    return {
        str(path.relative_to(folder)): hashlib.blake2b(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and not {".stepmark", "failures", without} & set(path.parts)
    }


@pytest.fixture
def refused(call: Callable[..., Told], tmp_path: Path) -> Callable[..., str]:
    """Calls with a recipe and flags, and checks the code, that nothing was trained, and that every file is as it was;
    gives the error."""

    def refused(*flags: str, code: int = 2, **fields: Any) -> str:
        recipe = write_recipe(tmp_path, **fields)
        without = "failures" if code == 2 else "console"  # kept of a run that fails, and not of a refused one
        before = contents(tmp_path, without)
        told = call(str(recipe), *flags)
        assert told.code == code, told
        after = contents(tmp_path, without)
        if code == 1 and "out/metrics.jsonl" not in before:  # nothing has been trained there
            ends = [found.pop("out/status.json", None) for found in (before, after)]
            assert not ends[1] or read_status(tmp_path / "out")["reason"].splitlines()[0] in told.error
            for found in (before, after):
                found.pop("out/events.jsonl", None)
        assert {name: after.get(name) for name in before} == before
        traces = ("checkpoint", "metrics", "status", "safetensors")
        assert not [name for name in after.keys() - before.keys() if any(trace in name for trace in traces)]
        return told.error

    return refused


@pytest.fixture(scope="module")
def run_of_two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    recipe = write_recipe(folder, save_steps=1, logging_steps=1)
    assert run(["train", str(recipe)]) == 0
    return folder / "out"


@pytest.fixture
def trained(run_of_two_steps: Path, tmp_path: Path) -> Path:
    """A copy of a finished run of two steps that saved both, at the output folder of the recipe."""
    copy = tmp_path / "out"
    shutil.copytree(run_of_two_steps, copy)
    return copy


# Fields


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"learning_rte": 1}, "learning_rte: "),
        ({"use_cpu": True}, "use_cpu: "),
        ({"deepspeed": "x.json"}, "deepspeed: "),
        ({"max_steps": "many"}, "max_steps: "),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size: "),
        ({"bf16": True, "dtype": "bfloat16"}, "bf16 and dtype: "),
        ({"model_name_or_path": "x"}, "model_name_or_path and config_name: "),
        ({"dataset_name": "python-stdlib"}, "dataset_name and train_file"),
        ({"optim": "adagrad"}, "optim: 'adagrad' "),
        ({"optim": "sgd", "optim_args": "speed=1"}, "optim_args: sgd "),
        ({"lr_scheduler_type": "square"}, "lr_scheduler_type: 'square' "),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"a": 1}}, "lr_scheduler_kwargs: "),
        ({"device": "gpu"}, "device: 'gpu' "),
        ({"report_to": "carrier_pigeon"}, "report_to: carrier_pigeon "),
        ({"config_name": "nope"}, "config_name: 'nope' "),
        ({"config_overrides": {"n_layers": 2}}, "config_overrides: GPT2Config "),
        ({"config_overrides": {"n_layer": "two"}}, "config_overrides: GPT2Config "),
        ({"config_overrides": {"n_embd": 15, "n_head": 2}}, "config_name and config_overrides: "),
        ({"config_overrides": {"activation_function": "x"}}, "config_name and config_overrides: "),
        ({"config_overrides": {"vocab_size": 10}}, "config_overrides: vocab_size 10 "),
        ({"tokenizer_name": "nope"}, "tokenizer_name: "),
    ],
)
def test_fields(refused: Callable[..., str], fields: dict[str, Any], words: str) -> None:
    assert words in refused(**fields)


def test_flags(refused: Callable[..., str]) -> None:
    assert refused("--learning_rte", "1").startswith("learning_rte: is not a field; did you mean learning_rate?")
    assert refused("--use_cpu").startswith("use_cpu: is not a Stepmark field; use device: cpu")
    assert refused("--max_steps", "soon").startswith("max_steps: should be a whole number, and is 'soon'; ")
    assert "--max_steps: expected one argument" in refused("--max_steps")
    assert refused("another.yaml").startswith("another.yaml: unrecognized argument")


def test_recipes(call: Callable[..., Told], tmp_path: Path) -> None:
    told = call(str(tmp_path / "nope.yaml"))
    assert (told.code, told.error.startswith(f"recipe {tmp_path / 'nope.yaml'}: cannot be read")) == (2, True)
    (tmp_path / "broken.yaml").write_text("max_steps: [1\n")
    assert "broken.yaml: is not valid YAML: line" in call(str(tmp_path / "broken.yaml")).error


# Data


def test_training_files(refused: Callable[..., str], tmp_path: Path) -> None:
    missing, empty, odd = tmp_path / "missing.txt", tmp_path / "empty.txt", tmp_path / "data.tsv"
    empty.touch()
    odd.write_text("words")
    assert refused(train_file=str(missing)).startswith(f"train_file: file {missing} does not exist")
    (tmp_path / "folder").mkdir()
    assert "folder has no file that ends with .txt" in refused(code=1, train_file=str(tmp_path / "folder"))
    assert "no file matches" in refused(train_file=f"{tmp_path}/folder/*.txt")
    assert refused(code=1, train_file=str(empty)).startswith(f"train_file: {empty} is empty")
    assert "has a format that is not read; supported are .txt" in refused(train_file=str(odd))
    binary = tmp_path / "data.xyz"
    binary.write_bytes(b"a\0b")
    assert refused(train_file=str(binary)).startswith(f"train_file: {binary} is a binary file, not text")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"tea\n" + b"caf\xe9 " * 100, "a.txt: line 2 is not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "a.jsonl, row 2: not valid JSON"),
        ("a.json", b"[]", "contains no text"),
        ("a.txt", b"\n \n", "contains no text"),
        ("a.jsonl", b'{"text": 3}\n', "text_column"),
        ("a.jsonl", b'{"instruction": "x", "output": "y"}\n', "set text_column to one of instruction, output"),
        ("a.parquet", b"PAR1 not really", "a.parquet cannot be read"),
    ],
)
def test_training_files_that_hold_no_text(
    call: Callable[..., Told], tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    told = call(str(write_recipe(tmp_path, train_file=str(tmp_path / name), validation_split_percentage=0)))
    assert told.code in (1, 2)
    assert words in told.error
    assert name in told.error


def test_a_block_longer_than_the_data_or_the_model(refused: Callable[..., str]) -> None:
    error = refused(code=1, block_size=5000, config_overrides={"n_positions": 5000, "n_embd": 16, "n_head": 2})
    assert error.startswith("block_size 5000 is longer than the training data")
    assert "set block_size to" in error
    error = refused(block_size=33)
    assert error.startswith(
        "block_size: 33 tokens are more than the model's 32 positions; set block_size to 32 or less"
    )
    assert "max_position_embeddings in config_overrides" in error
    assert refused(block_size=0).startswith("block_size: should be at least 2")


def test_evaluation_without_data(refused: Callable[..., str], tmp_path: Path) -> None:
    error = refused(eval_strategy="epoch", validation_split_percentage=0)
    assert error.startswith("eval_strategy: there is no validation data; give validation_file")
    empty = tmp_path / "empty.txt"
    empty.touch()
    assert "validation_file: " in refused(code=1, eval_strategy="epoch", validation_file=str(empty))


# Models


@pytest.fixture
def model_fields(trained: Path, tmp_path: Path) -> dict[str, Any]:
    """A recipe that starts from the weights of a finished run, in `<tmp>/model`."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in trained.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    shutil.rmtree(trained)
    return {"model_name_or_path": str(folder), "config_name": None, "config_overrides": None, "tokenizer_name": None}


def test_a_model_folder_is_taken_as_it_is(
    call: Callable[..., Told], model_fields: dict[str, Any], tmp_path: Path
) -> None:
    assert call(str(write_recipe(tmp_path, **model_fields))).code == 0


def test_a_model_folder_without_weights(refused: Callable[..., str], model_fields: dict[str, Any]) -> None:
    folder = Path(model_fields["model_name_or_path"])
    (folder / "model.safetensors").unlink()
    assert refused(**model_fields).startswith(f"model_name_or_path: no model can be loaded from {folder}: ")


def test_a_model_folder_with_corrupted_weights(refused: Callable[..., str], model_fields: dict[str, Any]) -> None:
    folder = Path(model_fields["model_name_or_path"])
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert refused(**model_fields).startswith(f"model_name_or_path: no model can be loaded from {folder}: ")


def test_a_model_folder_that_lacks_some_weights(refused: Callable[..., str], model_fields: dict[str, Any]) -> None:
    folder = Path(model_fields["model_name_or_path"])
    weights = load_file(folder / "model.safetensors")
    weights.pop("transformer.h.0.ln_1.bias")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "lacks weights of GPT2LMHeadModel: transformer.h.0.ln_1.bias;" in refused(**model_fields)


def test_a_model_folder_without_config_or_tokenizer(refused: Callable[..., str], model_fields: dict[str, Any]) -> None:
    folder = Path(model_fields["model_name_or_path"])
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert refused(**model_fields).startswith(f"tokenizer_name: no tokenizer could be loaded from '{folder}'")
    (folder / "config.json").unlink()
    assert refused(**model_fields).startswith(f"model_name_or_path: {folder} has no config.json")
    (folder / "config.json").write_text("{")
    model_fields["tokenizer_name"] = "bytes"
    assert refused(**model_fields).startswith("model_name_or_path: no model can be loaded from ")


def test_a_model_path_that_is_not_a_folder(refused: Callable[..., str], model_fields: dict[str, Any]) -> None:
    for path in ("/nope/nothing", "./nothing"):
        error = refused(**{**model_fields, "model_name_or_path": path})
        assert error == f"model_name_or_path: {path} is not a folder; name a Hugging Face model folder"


def test_a_tokenizer_with_more_tokens_than_the_model(refused: Callable[..., str], tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, n_positions=32, vocab_size=40, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "small")
    fields = {"model_name_or_path": str(tmp_path / "small"), "config_name": None, "config_overrides": None}
    assert refused(**fields).startswith("tokenizer_name: the tokenizer has 258 tokens and the model only 40 embeddings")


# Devices and ranks


def test_numbers_of_ranks(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused("--nproc", "0") == "--nproc: must be at least 1, but is 0"
    assert refused("--nproc=-2") == "--nproc: must be at least 1, but is -2"
    assert "--nproc: must be a whole number or auto, but is 'all'" in refused("--nproc", "all")
    for options in (
        ("--min_nproc", "1"),
        ("--min_nproc", "1", "--nproc", "2"),
        ("--min_nproc=1", "--max_restarts", "1"),
    ):
        assert refused(*options).startswith(
            "--min_nproc: is for ranks that are restarted; add --nproc and --max_restarts"
        )
    restarted = ("--max_restarts", "1", "--nproc", "2", "--min_nproc")
    assert refused(*restarted, "3").startswith("--min_nproc: must be from 1 to ")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert "--nproc: this process is already one of several ranks" in refused("--nproc", "2")


# The output folder


def test_an_output_folder_that_cannot_be_written(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        error = refused(output_dir=str(folder))
        assert error.startswith(f"output_dir: cannot write to {folder}: ")
        assert error.endswith("choose another folder")
    if os.path.ismount("/sys"):
        assert refused(output_dir="/sys/stepmark").startswith("output_dir: cannot write to /sys/stepmark: ")


def test_an_output_folder_without_room_for_a_checkpoint(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(output_module.shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 1000, 1000))
    error = refused(code=1)
    assert error.startswith("output_dir: ")
    assert "has 1 kB free and one checkpoint needs" in error
    assert "free some space" in error


def test_checkpoints_of_an_earlier_run(refused: Callable[..., str], trained: Path) -> None:
    error = refused()
    assert error.startswith(f"output_dir: {trained} has checkpoints of an earlier run (checkpoint-2); to continue ")
    assert read_status(trained)["state"] == "done"


# Resuming


def resume(refused: Callable[..., str], path: Path | str, code: int = 1, **fields: Any) -> str:
    error = refused(code=code, resume_from_checkpoint=str(path), max_steps=4, **fields)
    assert str(path) in error
    return error


def test_resuming_from_nothing(refused: Callable[..., str], trained: Path, tmp_path: Path) -> None:
    missing = trained / "checkpoint-7"
    error = resume(refused, missing, code=2)
    assert error.startswith(f"resume_from_checkpoint: there is no {missing}; name a checkpoint-N")
    assert "is not a Stepmark checkpoint" in resume(refused, trained, code=2)
    assert "is not a Stepmark checkpoint" in resume(refused, tmp_path / "text.txt", code=2)


@pytest.mark.parametrize(
    "file", ["model.safetensors", "manifest.json", "trainer_state.json", "config.json", "state.json"]
)
def test_resuming_from_a_corrupted_checkpoint(refused: Callable[..., str], trained: Path, file: str) -> None:
    flip_bit(trained / "checkpoint-2" / file)
    error = resume(refused, trained / "checkpoint-2")
    assert error.startswith("resume_from_checkpoint: ")
    assert file in error
    assert error.endswith("name another checkpoint, or true for the newest complete one")


def test_resuming_from_a_checkpoint_with_a_file_missing(refused: Callable[..., str], trained: Path) -> None:
    (optimizer,) = (trained / "checkpoint-2" / "optimizer").iterdir()
    optimizer.unlink()
    assert f"{optimizer} is missing" in resume(refused, trained / "checkpoint-2")
    (trained / "checkpoint-2" / "manifest.json").unlink()
    assert "it has no manifest.json" in resume(refused, trained / "checkpoint-2", code=2)


@pytest.mark.parametrize("file", ["model.safetensors", "manifest.json"])
def test_resuming_takes_the_newest_complete_checkpoint(
    call: Callable[..., Told], trained: Path, tmp_path: Path, file: str
) -> None:
    flip_bit(trained / "checkpoint-2" / file)
    recipe = write_recipe(tmp_path, resume_from_checkpoint=True, max_steps=3, save_steps=1)
    assert call(str(recipe)).code == 0
    assert [line["resumed"] for line in read_metrics(trained) if "resumed" in line] == [1]
    assert (trained / "damaged-checkpoint-2" / file).exists()
    assert (trained / "checkpoint-3").is_dir()


def test_going_back_leaves_what_is_newer(
    call: Callable[..., Told], trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def left(**fields: Any) -> list[str]:
        name = str(trained / "checkpoint-1")
        assert call(str(write_recipe(tmp_path, resume_from_checkpoint=name, max_steps=2, **fields))).code == 0
        return [path.name for path in trained.glob("left-*")]

    assert left(save_strategy="no") == []
    assert left(save_steps=2) == ["left-checkpoint-2"]
    assert "is newer than checkpoint-1, from which the run goes on: it is left-checkpoint-2 now" in caplog.text
    assert (trained / "checkpoint-2").is_dir()


def test_resuming_without_a_complete_checkpoint(refused: Callable[..., str], trained: Path) -> None:
    for step in (1, 2):
        flip_bit(trained / f"checkpoint-{step}" / "model.safetensors")
    error = refused(code=1, resume_from_checkpoint=True, max_steps=4)
    assert "none of the 2 checkpoints" in error
    assert str(trained) in error
    assert "move them away" in error


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"config_overrides": {**TINY, "n_layer": 2}}, "its model, n_layer was 1 and is now 2"),
        ({"block_size": 16}, "block_size was 32 and is now 16"),
        ({"seed": 7}, "its seed was 42 and is now 7"),
        ({"data_seed": 7}, "its data_seed was 42 and is now 7"),
    ],
)
def test_resuming_another_run(refused: Callable[..., str], trained: Path, fields: dict[str, Any], words: str) -> None:
    for given in (True, str(trained / "checkpoint-2")):
        error = refused(code=1, resume_from_checkpoint=given, max_steps=4, **fields)
        assert words in error
        assert "checkpoint-2 belongs to another run" in error


def test_resuming_with_other_text(refused: Callable[..., str], trained: Path, tmp_path: Path) -> None:
    other = write_text(tmp_path / "other.txt", lines=50)
    error = resume(refused, trained / "checkpoint-2", train_file=str(other))
    assert "text.txt: no longer read" in error
    assert "other.txt: added" in error


def test_resuming_from_a_model_alone(call: Callable[..., Told], refused: Callable[..., str], tmp_path: Path) -> None:
    assert call(str(write_recipe(tmp_path, save_only_model=True))).code == 0
    for given in (True, str(tmp_path / "out" / "checkpoint-2")):
        error = refused(code=1, resume_from_checkpoint=given, max_steps=4)
        assert "checkpoint-2 holds only the model (save_only_model); start a new run with model_name_or_path" in error


def test_resuming_from_a_checkpoint_of_a_loop_of_ones_own(refused: Callable[..., str], tmp_path: Path) -> None:
    from stepmark import Checkpointer

    with Checkpointer(tmp_path / "own") as checkpointer:
        checkpointer.save(3, {"model": torch.nn.Linear(2, 2)}, block=True)
    assert "was not saved by a Stepmark training run" in resume(refused, tmp_path / "own" / "checkpoint-3")


def test_resuming_with_nothing_there_begins(call: Callable[..., Told], tmp_path: Path) -> None:
    assert call(str(write_recipe(tmp_path, resume_from_checkpoint=True))).code == 0
    assert (tmp_path / "out" / "checkpoint-2").is_dir()


def test_a_folder_of_another_live_run(call: Callable[..., Told], refused: Callable[..., str], tmp_path: Path) -> None:
    from stepmark import Checkpointer

    with Checkpointer(tmp_path / "out") as other:
        other.claim()
        error = refused(code=1)
        assert not (tmp_path / "out" / "status.json").exists()
        assert str(tmp_path / "out") in error
        assert "stop that run, or choose another folder" in error
    assert call(str(write_recipe(tmp_path))).code == 0


# As a user calls it


def test_as_a_user_calls_it(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    recipe = str(write_recipe(tmp_path))
    wrong = [sys.executable, "-m", "stepmark", "train", recipe, "--max_steps", "soon"]
    empty = ("train", recipe, "--train_file", str(tmp_path / "empty.txt"))
    for done, code in (
        (subprocess.run(wrong, capture_output=True, text=True, cwd=tmp_path), 2),
        (commands.run(ranks, tmp_path, *empty), 1),
    ):
        assert done.returncode == code, done.stderr
        assert done.stdout == ""
        (line,) = [line for line in done.stderr.splitlines() if not line.startswith(("device: ", "train data: "))]
        assert line.startswith("error: ")


def test_a_rank_whose_report_cannot_be_written_prints_its_error(
    call: Callable[..., Told], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor's folder lies in TMPDIR, which is full or was tidied up."""
    monkeypatch.setenv("STEPMARK_REPORTS", str(tmp_path / "gone"))
    told = call(str(tmp_path / "no such recipe.yaml"))
    assert (told.code, "no such recipe.yaml" in told.error) == (2, True)
