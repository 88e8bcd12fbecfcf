"""A run that only extracts graphs (`neuron_parallel_compile`) computes placeholders: it leaves nothing of them."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers.integrations import CodeCarbonCallback

from stepmark import Checkpointer, Trainer, TrainingArguments, save
from stepmark.runtime.eager import EagerRuntime
from stepmark.trainer.interruption.run_end import (
    ask_to_stop,
    reason_to_stop,
    record_interruption,
    record_supervised_end,
)
from tests.support.programs import Blocks, tiny_model

VARIABLE = "NEURON_EXTRACT_GRAPHS_ONLY"


class Reporter(CodeCarbonCallback):
    """Writes on every rank and node, as some of transformers' reporters do."""

    def __init__(self) -> None:
        pass

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        pass

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        (Path(args.output_dir) / "reported").write_text("begun")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        (Path(args.output_dir) / "reported").write_text("ended")


def train(folder: Path, steps: int, *, callbacks: bool = False, **options: Any) -> Trainer:
    args = TrainingArguments(
        output_dir=str(folder),
        device="cpu",
        max_steps=steps,
        per_device_train_batch_size=2,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=1,
        logging_steps=1,
        disable_tqdm=True,
        **{"report_to": "none", **options},
    )
    given = [Reporter] if callbacks else []
    trainer = Trainer(tiny_model(), args, train_dataset=Blocks(20), eval_dataset=Blocks(4), callbacks=given)
    if callbacks:
        trainer.add_callback(Reporter())
    trainer.train()
    trainer.save_model()
    return trainer


class CountingRuntime(EagerRuntime):
    """Counts step boundaries."""

    boundaries = 0

    def step_boundary(self, *, wait: bool = False) -> None:
        self.boundaries += 1


def files_in(folder: Path) -> dict[str, bytes]:
    found = {}
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != ".stepmark"]  # a save that has ended may be clearing it
        paths = [Path(root, name) for name in names]
        found |= {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    return found


def test_nothing_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setattr("stepmark.runtime.xla_environment._warned", False)
    with caplog.at_level(logging.WARNING, "stepmark"):
        trainer = train(tmp_path, 4, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True)
    assert trainer.state.global_step == 4
    assert files_in(tmp_path) == {}
    assert [record.message for record in caplog.records if VARIABLE in record.message] == [
        f"checkpoint-2 is not saved: under {VARIABLE} values are placeholders"
    ]


def test_what_a_real_run_has_left_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path, 2)
    (tmp_path / ".checkpoint-3.0000dead-000003").mkdir()
    (tmp_path / ".checkpoint-3.0000dead-000003" / "half").write_bytes(b"a save that a kill has ended")
    ask_to_stop(tmp_path, "a real request")
    before = files_in(tmp_path)
    assert json.loads(before["status.json"])["step"] == 2
    monkeypatch.setenv(VARIABLE, "1")
    train(tmp_path, 6, resume_from_checkpoint=True)
    assert files_in(tmp_path) == before
    assert reason_to_stop(tmp_path) == "a real request"
    monkeypatch.delenv(VARIABLE)
    assert train(tmp_path, 4, resume_from_checkpoint=True).state.global_step == 4
    assert (tmp_path / "checkpoint-4").is_dir()


def test_training_twice_leaves_a_real_run_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path, 2)
    monkeypatch.setattr(
        "stepmark.trainer.run_folder.output_folder._FINISHED", set()
    )  # as another process has trained it
    before = files_in(tmp_path)
    monkeypatch.setenv(VARIABLE, "1")
    train(tmp_path, 4, resume_from_checkpoint=True)
    train(tmp_path, 2)  # a real run would move the first one aside
    assert files_in(tmp_path) == before


def test_nothing_is_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = mock.Mock()
    monkeypatch.setattr("huggingface_hub.HfApi", hub)
    monkeypatch.setenv(VARIABLE, "1")
    trainer = train(tmp_path, 2, push_to_hub=True, hub_model_id="someone/model")
    trainer.create_model_card()
    assert trainer.push_to_hub() is None
    assert files_in(tmp_path) == {}
    assert hub.mock_calls == []


def test_reporters_are_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "real", 2, callbacks=True, report_to="tensorboard")
    assert {"reported", "runs"} <= {path.name for path in (tmp_path / "real").iterdir()}
    monkeypatch.setenv(VARIABLE, "1")
    train(tmp_path / "extracted", 2, callbacks=True, report_to="tensorboard")
    assert files_in(tmp_path / "extracted") == {}


def test_a_launcher_and_a_signal_record_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path, 2)
    status = tmp_path / "status.json"
    status.write_text(json.dumps({"state": "running", "step": 1, "time": 0.0}))
    before = files_in(tmp_path)
    monkeypatch.setenv(VARIABLE, "1")
    record_supervised_end(tmp_path, "failed", "rank 1 ran out of memory", began=1.0)
    record_interruption(tmp_path, "SIGTERM", began=1.0)
    assert files_in(tmp_path) == before
    monkeypatch.delenv(VARIABLE)
    record_interruption(tmp_path, "SIGTERM", began=1.0)
    assert json.loads(status.read_text())["state"] == "interrupted"


def test_a_checkpointer_saves_nothing_but_runs_what_is_pending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"model": {"weight": torch.ones(3)}}
    runtime = CountingRuntime(torch.device("cpu"))
    with Checkpointer(tmp_path / "run", keep_last=1, runtime=runtime) as checkpointer:
        checkpointer.save(1, state, block=True)
        save({"a": torch.ones(2)}, tmp_path / "file")
        before = files_in(tmp_path)
        monkeypatch.setenv(VARIABLE, "1")
        boundaries = runtime.boundaries
        skipped = checkpointer.save(2, state, block=True)
        assert skipped.done()
        assert not skipped.result().exists()
        assert runtime.boundaries == boundaries + 1  # pending operations run as they would in a real save
        save({"a": torch.zeros(2)}, tmp_path / "file")
        assert files_in(tmp_path) == before
        monkeypatch.setenv(VARIABLE, "0")
        assert checkpointer.save(2, state, block=True) is not None


def test_a_corrupted_checkpoint_is_left_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"model": torch.nn.Linear(3, 3)}
    with Checkpointer(tmp_path, keep_last=2) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state, block=True)
    (weights,) = (tmp_path / "checkpoint-2").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    before = files_in(tmp_path)
    for extracting, unchanged in (("1", True), ("0", False)):
        monkeypatch.setenv(VARIABLE, extracting)
        with Checkpointer(tmp_path, keep_last=2) as checkpointer:
            assert checkpointer.restore(state) == 1
        assert (files_in(tmp_path) == before) == unchanged
