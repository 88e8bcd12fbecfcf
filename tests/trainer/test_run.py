"""A run is opened once, by a recipe or by its Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepmark import Trainer, TrainingArguments
from stepmark.trainer import run as run_module
from stepmark.trainer.run import Run
from stepmark.trainer.run_folder.run_log import read_metrics
from tests.support.programs import Blocks, tiny_model


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that were prepared."""
    found: list[Path] = []
    original = run_module.prepare_output_folder

    def note(folder: Path, *args: Any, **options: Any) -> None:
        found.append(folder)
        original(folder, *args, **options)

    monkeypatch.setattr(run_module, "prepare_output_folder", note)
    return found


def arguments(folder: Path) -> TrainingArguments:
    return TrainingArguments(output_dir=str(folder), device="cpu", max_steps=1, save_strategy="no", disable_tqdm=True)


def test_an_opened_run_is_not_opened_again(
    tmp_path: Path, prepared: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(tmp_path / "out")
    run = Run.open(args)
    run.prepare_folder()
    monkeypatch.setattr(run_module, "start", lambda *_: pytest.fail("opened twice"))
    trainer = Trainer(tiny_model(), args, train_dataset=Blocks(8), run=run)
    assert trainer.context is run.context
    trainer.train()
    assert prepared == [tmp_path / "out"]
    trainer.train()  # much later, perhaps, in a notebook
    assert prepared == 2 * [tmp_path / "out"]


def test_a_trainer_of_a_script_opens_its_own(tmp_path: Path, prepared: list[Path]) -> None:
    trainer = Trainer(tiny_model(), arguments(tmp_path / "first"), train_dataset=Blocks(8))
    assert prepared == []
    trainer.train()
    trainer.args.output_dir = str(tmp_path / "second")
    trainer.train()
    assert prepared == [tmp_path / "first", tmp_path / "second"]
    assert len(read_metrics(tmp_path / "first")) == len(read_metrics(tmp_path / "second")) > 0
