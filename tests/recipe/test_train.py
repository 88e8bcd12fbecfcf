from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from scripts.pipeline_comparison import pipeline_mesh
from stepmark.checkpoint.host_memory import _RESERVE, MACHINE
from stepmark.cli.main import run
from stepmark.config.recipe import ModelArguments
from stepmark.config.training_fields import TrainingFields
from stepmark.errors import UsageError
from stepmark.launch.world import World
from stepmark.parallel.pipeline.staged_model import staged
from stepmark.recipe import model, train
from stepmark.trainer import run_model
from stepmark.trainer.run import Run
from tests.support.models import build
from tests.support.recipes import write_recipe


@pytest.mark.parametrize(("checkpointing", "sizes"), [(False, [5, 4]), (True, [4, 5])])
def test_layers_are_divided_for_the_gradient_checkpointing_that_the_recipe_asks_for(
    monkeypatch: pytest.MonkeyPatch, checkpointing: bool, sizes: list[int]
) -> None:
    mesh = pipeline_mesh(0, 2)
    monkeypatch.setattr(run_model, "make_mesh", lambda args, context: mesh)
    args = TrainingFields(pipeline_parallel_size=2, gradient_accumulation_steps=2, gradient_checkpointing=checkpointing)
    made = build("llama", num_hidden_layers=9)
    train._model_factory(args, mesh.context).shard(made)
    stages = staged(made)
    assert stages is not None
    assert [end - begin for begin, end in stages.plan.bounds] == sizes


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"config_name": "gpt7"}, "config_name: 'gpt7' is neither a folder"),
        ({"config_overrides": {"n_layers": 2}}, "config_overrides: GPT2Config has no n_layers"),
        ({"block_size": 64}, "block_size: 64 tokens are more than the model's 32 positions"),
        (
            {"lr_scheduler_type": "warmup_stable_decay"},
            "lr_scheduler_kwargs: the schedule warmup_stable_decay does not",
        ),
    ],
)
def test_a_wrong_configuration_is_found_before_data_are_tokenized(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fields: dict[str, Any],
    named: str,
) -> None:
    monkeypatch.setattr(train, "prepare_data", lambda *_: pytest.fail("the data are tokenized"))
    assert run(["train", str(write_recipe(tmp_path, **fields))]) != 0
    assert f"error: {named}" in capsys.readouterr().err


def test_a_model_without_room_in_host_memory_is_refused_before_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model, "free_host_memory", lambda: {MACHINE: 1 << 30, "control group 0:1": _RESERVE + 5000})
    monkeypatch.setattr(train, "prepare_data", lambda *_: pytest.fail("the data are tokenized"))
    assert run(["train", str(write_recipe(tmp_path))]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: config_name: making the model needs ")
    assert "more of host memory for the model, and 67.1 MB are free; divide it among ranks" in error


@pytest.mark.parametrize(("node", "fits"), [(0, False), (1, True)])
def test_ranks_of_one_node_share_its_memory(monkeypatch: pytest.MonkeyPatch, node: int, fits: bool) -> None:
    config = GPT2Config(n_layer=1, n_embd=256, n_head=2, vocab_size=1000, n_positions=16)
    needed = 4 * sum(each.numel() for each in GPT2LMHeadModel(config).parameters())
    monkeypatch.setattr(model, "free_host_memory", lambda: {MACHINE: _RESERVE + needed * 3 // 2})

    def gather(report: tuple[int, int, Any]) -> list[Any]:
        assert report[1] == needed
        return [report, (node, *report[1:])]

    own: Any = SimpleNamespace(world=World(), host=SimpleNamespace(all_gather=gather))
    fields = ModelArguments(config_name="gpt2", tokenizer_name="bytes")
    with contextlib.nullcontext() if fits else pytest.raises(UsageError, match="for the models of the 2 ranks on this"):
        model.check_makeable(fields, config, None, "float32", own)


@pytest.mark.parametrize("command", ["train", "plan", "precompile"])
def test_an_unknown_optimizer_is_found_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setattr(model, "build_tokenizer", lambda *_: pytest.fail("the tokenizer is loaded"))
    monkeypatch.setattr(Run, "open", lambda *_: pytest.fail("the run is opened"))
    assert run([command, str(write_recipe(tmp_path, optim="adagrad"))]) == 2
    assert "error: optim: 'adagrad' is not supported" in capsys.readouterr().err


def test_the_configuration_of_the_model_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, original = [], model.build_config
    monkeypatch.setattr(model, "build_config", lambda *given: made.append(given) or original(*given))
    assert run(["train", str(write_recipe(tmp_path, max_steps=1))]) == 0
    assert len(made) == 1


def test_a_moved_run_does_not_start_anew_in_its_old_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["train", str(write_recipe(tmp_path, save_steps=1, resume_from_checkpoint=True))]) == 0
    old, moved = tmp_path / "out", tmp_path / "other" / "out"
    moved.parent.mkdir()
    shutil.move(old, moved)
    more = ["--max_steps", "3"]
    for recipe in ("other/out/used_recipe.yaml", "other/out/checkpoint-2/used_recipe.yaml"):
        capsys.readouterr()
        assert run(["train", recipe, *more]) == 2
        error = capsys.readouterr().err
        assert f"its output_dir is {old}" in error
        assert "`--output_dir other/out --resume_from_checkpoint true` continues" in error
        assert not old.exists()
    new = moved.parent / "new.yaml"
    shutil.copy(moved / "used_recipe.yaml", new)
    (tmp_path / "link").symlink_to(moved.parent)
    flags = ["--output_dir", "other/out", "--resume_from_checkpoint", "true"]
    assert run(["train", "link/out/used_recipe.yaml", *more, *flags]) == 0
    assert (moved / "checkpoint-3").is_dir()
    assert run(["train", "link/out/used_recipe.yaml"]) == 0, "the folder by another name"
    assert not old.exists()
    assert run(["train", str(new), "--output_dir", str(old)]) == 0
    assert (old / "checkpoint-2").is_dir()


def test_a_refused_resumption_says_which_of_the_data_have_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(write_recipe(tmp_path, save_steps=2))
    assert run(["train", recipe]) == 0
    resume = ["--resume_from_checkpoint", "true", "--max_steps", "3"]
    assert run(["train", recipe, *resume, "--block_size", "16"]) == 1
    assert "its training data have changed (block_size was 32 and is now 16); resume" in capsys.readouterr().err
    with (tmp_path / "text.txt").open("a") as text:
        text.write("one more line\n")
    assert run(["train", recipe, *resume]) == 1
    assert f"(train_file {tmp_path}/text.txt: changed); resume" in capsys.readouterr().err
