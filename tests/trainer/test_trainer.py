"""What a run leaves in its folder when it ends: results of the model that the folder holds, and how it ended."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import log_metrics

from stepmark import Trainer, TrainingArguments, read_metrics
from stepmark.errors import CheckpointNotFound, DataError, StepmarkError, UsageError
from stepmark.filesystem import files
from stepmark.launch.signal_listener import RunInterrupted
from stepmark.liveness.failure_report import FailureReport
from stepmark.liveness.host_group import HostGroup
from stepmark.trainer.interruption.run_end import ending_outside_training
from stepmark.trainer.run_folder import model_export, output_folder
from stepmark.trainer.run_folder.output_folder import prepare_output_folder
from tests.support.programs import Blocks, StopsAt, tiny_model
from tests.trainer.compat.test_strategies import steps, trainer

BEST_FIRST = {
    "learning_rate": 3e-2,  # the tokens are random: the longer it trains, the worse the evaluations
    "load_best_model_at_end": True,
    **steps("eval", 4),
    **steps("save", 4),
}


def train(folder: Path, *callbacks: TrainerCallback, **options: Any) -> Any:
    made, _ = trainer(folder, *callbacks, **options)
    made.train(save_model=True)
    return made


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def statuses(folder: Path) -> list[str]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [line["event"] for line in lines if line["event"] in ("done", "failed", "interrupted")]


def evaluation_at(made: Any, step: int) -> float:
    (loss,) = [log["eval_loss"] for log in made.state.log_history if log["step"] == step and "eval_loss" in log]
    return float(loss)


def test_results_are_those_of_the_best_model_where_it_is_loaded(tmp_path: Path) -> None:
    made = train(tmp_path, **BEST_FIRST)
    best = evaluation_at(made, 4)
    assert best < evaluation_at(made, 12)
    for name in ("eval_results.json", "all_results.json"):
        assert read(tmp_path / name)["eval_loss"] == best
    epochs = [read(tmp_path / f"{name}_results.json")["epoch"] for name in ("train", "all", "eval")]
    assert epochs == [made.state.epoch, made.state.epoch, pytest.approx(made.state.epoch / 3)]
    assert made.evaluate()["eval_loss"] == pytest.approx(best, rel=1e-6)


def test_a_finished_run_that_is_started_again_keeps_its_results(tmp_path: Path) -> None:
    options = {**steps("eval", 4), **steps("save", 4), "resume_from_checkpoint": True, "metric_for_best_model": "loss"}
    train(tmp_path, **options)
    best = read(tmp_path / "status.json")["best_metric"]
    names = ("train_results.json", "eval_results.json", "all_results.json", "trainer_state.json")
    before = {name: read(tmp_path / name) for name in names}
    metrics = (tmp_path / "metrics.jsonl").read_text().count("eval_loss")
    train(tmp_path, **options)
    assert {name: read(tmp_path / name) for name in names} == before
    assert (tmp_path / "metrics.jsonl").read_text().count("eval_loss") == metrics
    assert read(tmp_path / "status.json")["best_metric"] == best


def test_a_run_that_is_killed_between_its_last_save_and_its_end_has_the_same_history(tmp_path: Path) -> None:
    options = {**steps("eval", 4), **steps("save", 4), "resume_from_checkpoint": True}
    timed = ("train_runtime", "train_samples_per_second", "train_steps_per_second")

    def history() -> list[dict[str, Any]]:
        logs = read(tmp_path / "trainer_state.json")["log_history"]
        return [{name: log[name] for name in log if name not in timed} for log in logs]

    train(tmp_path, **options)
    whole = history()
    for name in ("trainer_state.json", "train_results.json", "status.json"):
        (tmp_path / name).unlink()
    train(tmp_path, **options)
    assert history() == whole
    assert "train_loss" in whole[-1]


def test_a_run_that_is_continued_after_its_end_has_new_results(tmp_path: Path) -> None:
    train(tmp_path, max_steps=4, resume_from_checkpoint=True, **steps("save", 4))
    train(tmp_path, max_steps=8, resume_from_checkpoint=True, **steps("save", 4))
    assert read(tmp_path / "train_results.json")["epoch"] == pytest.approx(1.6)


@pytest.mark.parametrize("last", [12, 16])
def test_a_run_whose_folder_was_moved_ends(tmp_path: Path, last: int) -> None:
    train(tmp_path / "old", resume_from_checkpoint=True, **BEST_FIRST)
    shutil.move(tmp_path / "old", tmp_path / "new")
    made = train(tmp_path / "new", max_steps=last, resume_from_checkpoint=True, **BEST_FIRST)
    assert made.state.best_model_checkpoint == str(tmp_path / "new" / "checkpoint-4")
    assert read(tmp_path / "new" / "eval_results.json")["eval_loss"] == evaluation_at(made, 4)


def test_a_best_checkpoint_that_is_gone_is_forgotten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, **BEST_FIRST)
    shutil.rmtree(tmp_path / "checkpoint-4")
    with caplog.at_level(logging.WARNING, "stepmark"):
        made = train(tmp_path, max_steps=16, resume_from_checkpoint=True, **BEST_FIRST)
    assert "checkpoint-4 no longer exists" in caplog.text
    assert made.state.best_global_step == 16


def test_a_run_is_done_when_its_model_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    save_model = Trainer.save_model

    def look(trainer: Trainer) -> None:
        seen.append(read(tmp_path / "status.json")["state"])
        save_model(trainer)

    monkeypatch.setattr(Trainer, "save_model", look)
    train(tmp_path)
    assert seen == ["running"]
    assert (tmp_path / "model.safetensors").is_file()
    assert statuses(tmp_path) == ["done"]


def test_a_full_disk_at_the_end_fails_the_run_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(model_export, "_write_weights", full)
    with pytest.raises(StepmarkError, match=r"^the model cannot be written to .*: I/O error: No space left") as caught:
        train(tmp_path)
    assert str(caught.value).endswith("; free some space there, or use another folder")
    assert "\n" not in str(caught.value)
    assert read(tmp_path / "status.json")["state"] == "failed"
    assert statuses(tmp_path) == ["failed"]


@pytest.mark.parametrize("umask", [0o022, 0o007])
def test_the_final_model_has_the_permissions_of_a_checkpoint(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        train(tmp_path, save_strategy="steps", save_steps=100)
    finally:
        os.umask(before)
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    for path in (tmp_path / "model.safetensors", checkpoint / "model.safetensors", tmp_path / "config.json"):
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask, path
    assert not list(tmp_path.rglob(".permissions-*"))


def test_probes_of_starts_that_were_killed_are_removed(tmp_path: Path) -> None:
    old, young = tmp_path / f".stepmark-{'0' * 32}", tmp_path / f".stepmark-{'1' * 32}"
    for path in (old, young):
        path.touch()
    os.utime(old, (time.time() - 1000, time.time() - 1000))
    prepare_output_folder(tmp_path, HostGroup())
    assert [path.name for path in tmp_path.iterdir()] == [young.name]  # it may be another start's, at this moment


@pytest.mark.parametrize(
    ("number", "earlier", "code"),
    [
        (errno.ENOSPC, [], 1),
        (errno.ESTALE, [], 1),
        (errno.EDQUOT, [], 1),
        (errno.EACCES, [], 2),
        (errno.EROFS, [], 2),  # nothing was ever written there
        (errno.EROFS, ["events.jsonl"], 1),
    ],
)
def test_a_disk_in_trouble_is_no_wrong_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, earlier: list[str], code: int
) -> None:
    """Another attempt may find it well again, and one that failed leaves nothing."""
    for name in earlier:
        (tmp_path / name).touch()

    def fail(path: Path, data: bytes, *, durable: bool = True) -> None:
        path.touch()
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files, "write_file", fail)
    with pytest.raises(StepmarkError, match="output_dir: cannot write to") as caught:
        prepare_output_folder(tmp_path, HostGroup())
    report = FailureReport.of(caught.value, 0)
    assert (report.exit_code, report.permanent) == (code, code == 2)
    assert [path.name for path in tmp_path.iterdir()] == earlier
    assert str(caught.value).count("another folder") == (number != errno.ESTALE)


@pytest.mark.parametrize("name", ["train_results.json", "all_results.json"])
def test_results_that_cannot_be_written_are_an_error_of_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / name / "in the way").mkdir(parents=True)
    message = r"^the results cannot be written to .*: Is a directory; then start the run again"
    with pytest.raises(StepmarkError, match=message):
        train(tmp_path)
    assert statuses(tmp_path) == ["failed"]


def test_a_signal_while_the_model_is_written_is_recorded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("stepmark.trainer.run_folder.model_export.write_model", interrupted)
    with pytest.raises(RunInterrupted), ending_outside_training(tmp_path):
        train(tmp_path, **steps("save", 12))
    assert statuses(tmp_path) == ["interrupted"]
    assert capfd.readouterr().err.count("interrupted by SIGTERM: not training") == 1


class Counts(TrainerCallback, ExportableState):
    """A callback with state; a run may have several."""

    def __init__(self, name: str = "", seen: int = 0) -> None:
        self.name = name
        self.seen = seen

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seen += 1

    def state(self) -> dict[str, Any]:
        return {"args": {"name": self.name}, "attributes": {"seen": self.seen}}


def test_several_callbacks_of_one_class_are_restored_in_order(tmp_path: Path) -> None:
    train(tmp_path, Counts("a"), Counts("b", seen=100), max_steps=2, **steps("save", 2))
    first, second = Counts("a"), Counts("b")
    train(tmp_path, first, second, max_steps=3, resume_from_checkpoint=True, **steps("save", 2))
    assert (first.seen, second.seen) == (3, 103)


def test_callbacks_get_back_what_they_were_made_with_where_the_arguments_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, Counts("a"), max_steps=2, **steps("save", 2))
    for restored, name in ((False, "other"), (True, "a")):
        callback = Counts("other")
        options = {"restore_callback_states_from_checkpoint": restored, "resume_from_checkpoint": True}
        train(tmp_path, callback, max_steps=2, **options, **steps("save", 2))
        assert (callback.name, callback.seen) == (name, 2)
    assert "run lacks" not in caplog.text
    train(tmp_path, max_steps=3, resume_from_checkpoint=True, **steps("save", 2))
    assert "the checkpoint has the state of callbacks that this run lacks: Counts" in caplog.text


class Logs(TrainerCallback):
    def __init__(self) -> None:
        self.all: list[dict[str, float]] = []

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        self.all.append(logs)


def test_the_last_log_has_the_results_of_training(tmp_path: Path) -> None:
    logs = Logs()
    made = train(tmp_path, logs, max_steps=2)
    last, results = logs.all[-1], read(tmp_path / "train_results.json")
    assert {"train_loss", "train_runtime", "train_samples_per_second", "train_steps_per_second"} <= last.keys()
    assert last["train_loss"] == results["train_loss"] == made.state.log_history[-1]["train_loss"]


def test_results_count_the_samples_only_with_the_final_model(tmp_path: Path) -> None:
    """As scripts of transformers do, where they call `save_metrics`; `Trainer.train` alone adds nothing."""
    trainer(tmp_path / "script", max_steps=1)[0].train()
    assert "train_samples" not in read(tmp_path / "script" / "train_results.json")
    train(tmp_path / "recipe", max_steps=1)
    assert read(tmp_path / "recipe" / "train_results.json")["train_samples"] == 10


def test_an_evaluation_returns_the_epoch_as_transformers_does(tmp_path: Path) -> None:
    made = train(tmp_path, max_steps=2, **steps("eval", 2))
    assert made.evaluate()["epoch"] == made.state.epoch == read(tmp_path / "eval_results.json")["epoch"]


def test_a_script_prints_and_saves_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = train(tmp_path, max_steps=2)
    metrics = {"predict_loss": 0.123456, "predict_samples": 7, "predict_runtime": 3725.257, "total_flos": 5.0 * 2**30}
    assert re.search(r"^data     \d+ samples, \d+ steps per epoch$", capsys.readouterr().err, re.MULTILINE)
    made.log_metrics("predict", metrics)
    ours = capsys.readouterr().out
    log_metrics(made, "predict", metrics)  # transformers' own
    assert ours == capsys.readouterr().out
    made.log_metrics("predict", {"nothing": None, "rows": [1, 2]})  # at which transformers' raises, on this rank alone
    assert "rows    = [1, 2]" in capsys.readouterr().out
    made.log_metrics("predict", {})
    made.save_metrics("predict", {"predict_loss": 0.25})
    made.save_metrics("test", {"test_loss": 0.5}, combined=False)
    assert read(tmp_path / "predict_results.json") == {"predict_loss": 0.25}
    assert read(tmp_path / "test_results.json") == {"test_loss": 0.5}
    combined = read(tmp_path / "all_results.json")
    assert combined["predict_loss"] == 0.25
    assert "train_loss" in combined
    assert "test_loss" not in combined
    (tmp_path / "trainer_state.json").unlink()
    made.save_state()
    assert read(tmp_path / "trainer_state.json")["global_step"] == 2


def test_a_process_may_train_again_where_it_has_finished_a_run(tmp_path: Path) -> None:
    def train_again() -> Trainer:
        args = TrainingArguments(
            output_dir=str(tmp_path), device="cpu", max_steps=2, save_steps=2, logging_steps=1, disable_tqdm=True
        )
        made = Trainer(tiny_model(), args, train_dataset=Blocks(8))
        made.train()
        return made

    first = train_again()
    (tmp_path / "system").mkdir(exist_ok=True)
    (tmp_path / "system" / "rank-0.jsonl").write_text("first\n")
    losses = [line["loss"] for line in read_metrics(tmp_path) if "loss" in line]
    first.args.max_steps = 3
    first.train()  # the same Trainer, and then another one
    train_again()
    assert [line["step"] for line in read_metrics(tmp_path) if "loss" in line] == [1, 2]
    moved = tmp_path / "earlier-run-1"
    assert (moved / "system" / "rank-0.jsonl").read_text() == "first\n"
    assert (moved / "checkpoint-2" / "model.safetensors").is_file()
    assert [line["loss"] for line in read_metrics(moved) if "loss" in line] == losses
    assert json.loads((moved / "status.json").read_text())["state"] == "done"
    assert [line["step"] for line in read_metrics(tmp_path / "earlier-run-2") if "loss" in line] == [1, 2, 3]
    output_folder._FINISHED.clear()  # as in another process
    with pytest.raises(UsageError, match="^output_dir: .*has checkpoints of an earlier run"):
        train_again()


def test_an_earlier_run_and_a_model_are_no_checkpoints_to_resume(tmp_path: Path) -> None:
    made = train(tmp_path / "run", max_steps=1, **steps("save", 1))
    made.save_model(str(tmp_path / "model"))
    output_folder._FINISHED.clear()
    with pytest.raises(UsageError, match=r"in a script train\(resume_from_checkpoint=True\); or choose another"):
        train(tmp_path / "run", max_steps=2, **steps("save", 1))
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(CheckpointNotFound, match="it is a model, from which a new run starts: load it as the model"):
        made.train(resume_from_checkpoint=str(tmp_path / "model"))


class Remembering(nn.Module):
    """Has a buffer that grows, and loads its state itself, as transformers' tests do it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)
        self.register_buffer("seen", torch.empty(0))

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        self.seen = state_dict["seen"].clone()
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen = torch.cat([self.seen, features[:, 0].detach()])
        return {"loss": nn.functional.cross_entropy(self.layer(features), labels)}


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"features": torch.arange(4.0) + index, "labels": torch.tensor(index % 2)}


def test_a_buffer_that_grows_is_restored_by_a_model_that_loads_its_state(tmp_path: Path) -> None:
    def train(folder: Path, *callbacks: Any) -> Any:
        args = TrainingArguments(
            output_dir=str(folder), max_steps=6, save_steps=3, per_device_train_batch_size=2, disable_tqdm=True,
            device="cpu", resume_from_checkpoint=True,
        )  # fmt: skip
        trainer = Trainer(Remembering(), args, train_dataset=Rows(), callbacks=list(callbacks))
        trainer.train()
        return trainer.model

    whole = train(tmp_path / "whole")
    assert sorted(whole.seen.tolist()) == list(range(12))
    train(tmp_path / "parts", StopsAt(3))
    resumed = train(tmp_path / "parts")
    assert torch.equal(resumed.seen, whole.seen)
    assert torch.equal(resumed.layer.weight, whole.layer.weight)


def test_the_first_activation_that_overflows_is_reported(tmp_path: Path) -> None:
    made, _ = trainer(tmp_path, debug="underflow_overflow", max_steps=1, save_strategy="no")
    with torch.no_grad():
        made.model.transformer.h[0].mlp.c_fc.weight[0, 0] = float("inf")
    with pytest.raises(ValueError, match="inf/nan detected"):
        made.train()


def test_memory_is_in_the_results_where_it_is_asked_for(tmp_path: Path) -> None:
    for skips in (False, True):
        made, _ = trainer(tmp_path / str(skips), skip_memory_metrics=skips, save_strategy="no", **steps("eval", 2))
        found = made.train().metrics
        evaluated, predicted = made.evaluate(), made.predict(Blocks(2)).metrics
        names = ("init_mem_cpu_alloc_delta", "train_mem_cpu_peaked_delta")
        assert all((name in found) != skips for name in names)
        assert ("eval_mem_cpu_alloc_delta" in evaluated) != skips
        assert ("test_mem_cpu_alloc_delta" in predicted) != skips


def test_samples_that_are_no_dicts_are_named(tmp_path: Path) -> None:
    made, _ = trainer(tmp_path)
    made.train_dataset = torch.utils.data.TensorDataset(torch.zeros(8, 4), torch.zeros(8))
    for use in (made.train, lambda: made.evaluate(made.train_dataset)):
        with pytest.raises(DataError, match=r"^a batch is a list; let the dataset's samples be dicts"):
            use()


def test_what_asks_for_accelerate_gets_the_ranks_and_the_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, _ = trainer(tmp_path)
    accelerator, loader = made.accelerator, made.get_train_dataloader()
    assert accelerator.unwrap_model(made.model) is made.model
    assert (accelerator.num_processes, accelerator.device.type, accelerator.state.deepspeed_plugin) == (1, "cpu", None)
    assert accelerator.gather(torch.tensor(3)).item() == 3
    accelerator.print("completed", 1, sep=": ")
    accelerator.is_local_main_process = False
    accelerator.print("of another rank")
    assert capsys.readouterr().out == "completed: 1\n"
    assert made._loaders.steps_of(accelerator.prepare(loader)) is loader.loader
    with pytest.raises(AttributeError, match="no attribute 'accumulate': Stepmark does not use accelerate"):
        accelerator.accumulate(made.model)
    made.accelerator = "of the script"
    assert made.accelerator == "of the script"
