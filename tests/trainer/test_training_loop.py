"""Epochs that end early, what callbacks add to checkpoints, and the position in the data."""

from __future__ import annotations

import json
import math
import shlex
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from stepmark.cli.main import run as call
from stepmark.errors import TrainingDiverged
from stepmark.filesystem.json_files import read_lines
from stepmark.launch.signal_listener import RunInterrupted
from stepmark.trainer.interruption.run_end import record_interruption
from tests.support.programs import StopsAt
from tests.trainer.compat.test_strategies import run, steps, trainer


class Epochs(TrainerCallback):
    """The epoch that the loader's position is in at each step."""

    def __init__(self) -> None:
        self.epochs: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.epochs.append(state.epoch)


class EndsEpochs(TrainerCallback):
    """Ends the epoch after these steps."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop |= state.global_step in self.steps


def test_an_epoch_that_a_callback_ends_is_followed_by_the_next_one(tmp_path: Path) -> None:
    """There are five steps in an epoch."""
    seen = Epochs()
    recorder = run(tmp_path, EndsEpochs(2), seen, max_steps=11)
    assert seen.epochs == pytest.approx([0.2, 0.4, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2, 2.4, 2.6, 2.8])
    assert recorder.epochs == [2, 7, 11]


def test_a_run_resumed_where_an_epoch_was_ended_early_is_in_the_next_one(tmp_path: Path) -> None:
    whole, first, second = Epochs(), Epochs(), Epochs()
    saved = steps("save", 2)
    run(tmp_path / "whole", EndsEpochs(2), whole, max_steps=6, **saved)
    run(tmp_path / "cut", EndsEpochs(2), first, max_steps=2, **saved)
    run(tmp_path / "cut", second, max_steps=6, resume_from_checkpoint=True, **saved)
    assert (first.epochs + second.epochs)[:6] == whole.epochs[:6]


def test_epochs_that_end_early_are_not_made_up_for(tmp_path: Path) -> None:
    """The run has the epochs it was asked for, and saves what it has trained last."""
    options = {"max_steps": -1, "num_train_epochs": 2.0, **steps("save", 4)}
    recorder = run(tmp_path, EndsEpochs(2, 5), **options)
    assert recorder.epochs == [2, 5]
    assert recorder.saves == [4, 5]


def test_the_epochs_of_max_steps_are_not_made_up_for_either(tmp_path: Path) -> None:
    """Ten steps are two epochs, as in transformers."""
    recorder = run(tmp_path, EndsEpochs(2, 5), max_steps=10, **steps("save", 4))
    assert recorder.epochs == [2, 5]
    assert recorder.saves == [4, 5]
    recorder = run(tmp_path / "complete", EndsEpochs(2), max_steps=10, **steps("save", 4))
    assert recorder.epochs == [2, 7]  # the last one is complete


class EvaluatesAgain(TrainerCallback):
    """Asks for another evaluation in each; that of the last step of an epoch is followed by another one at its end."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_evaluate = True


class FailsAt(TrainerCallback):
    """Raises an error at an event of a step."""

    def __init__(self, event: str, step: int) -> None:
        self.step = step
        setattr(self, event, self.fail)

    def fail(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise RuntimeError("failed")


@pytest.mark.parametrize(
    ("callback", "event", "failed", "epochs", "evaluations"),
    [
        (EndsEpochs(2), "on_step_begin", 4, [2, 7], [5, 7]),
        (EndsEpochs(2), "on_epoch_end", 2, [2, 7], [5, 7]),
        (EvaluatesAgain(), "on_epoch_end", 5, [5, 10], [5, 5, 10, 10]),
    ],
)
def test_a_resumed_run_follows_what_callbacks_have_asked_for_before(
    tmp_path: Path, callback: TrainerCallback, event: str, failed: int, epochs: list[int], evaluations: list[int]
) -> None:
    """Epochs that were ended early are not made up for, and an evaluation is repeated, as in a run left alone."""
    options: dict[str, Any] = {"max_steps": 10, **steps("save", 1), **steps("eval", 5)}
    whole = run(tmp_path / "whole", callback, **options)
    assert (whole.epochs, whole.evaluations) == (epochs, evaluations)
    with pytest.raises(RuntimeError, match="failed"):
        run(tmp_path / "cut", FailsAt(event, failed), callback, **options)
    resumed = run(tmp_path / "cut", callback, resume_from_checkpoint=True, **options)
    assert resumed.epochs == epochs[-len(resumed.epochs) :]
    assert resumed.order == whole.order[-len(resumed.order) :]
    finished, _ = trainer(tmp_path / "cut", callback, resume_from_checkpoint=True, **options)
    assert finished.train().global_step == epochs[-1]


def test_the_log_of_an_epochs_end_sees_the_model_training_also_in_a_resumed_run(tmp_path: Path) -> None:
    """TRL's trainers log training's metrics then, and those of evaluations otherwise."""
    options: dict[str, Any] = {"max_steps": 10, "logging_strategy": "epoch", **steps("save", 1)}
    with pytest.raises(RuntimeError, match="failed"):
        run(tmp_path, FailsAt("on_epoch_end", 5), **options)
    seen: list[bool] = []
    resumed, _ = trainer(tmp_path, resume_from_checkpoint=True, **options)
    resumed.model.eval()  # as from_pretrained returns it
    log = resumed.log
    resumed.log = lambda *given: (seen.append(resumed.model.training), log(*given))  # type: ignore[method-assign]
    resumed.train()
    assert seen == [True] * 3


def test_a_finished_run_that_is_started_again_keeps_what_a_log_of_ones_own_has_added(tmp_path: Path) -> None:
    """As TRL's trainers add their metrics."""

    def adding(log: Any) -> Any:
        def added(logs: dict[str, float], *given: Any) -> None:
            logs.update(extra=2.0)
            log(logs, *given)

        return added

    found = []
    for _ in range(2):
        made, _recorder = trainer(tmp_path, resume_from_checkpoint=True, **steps("save", 6))
        made.log = adding(made.log)  # type: ignore[method-assign]
        made.train()
        found.append(json.loads((tmp_path / "train_results.json").read_text()))
    assert found[0] == found[1]
    assert found[0]["extra"] == 2.0


class Breaks(TrainerCallback):
    """Makes the weights nan before a step, counted from 1."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == self.step - 1:
            next(model.parameters()).data.fill_(math.nan)


def test_a_run_of_nan_ends_where_it_is_next_read_and_before_it_is_saved(tmp_path: Path) -> None:
    made, recorder = trainer(tmp_path, Breaks(5), **steps("save", 4), **steps("logging", 2))
    with pytest.raises(TrainingDiverged, match=r"step 5 .*checkpoint-4"):
        made.train()
    assert made.state.global_step == 8  # 5, 6 and 7 are nan; 6 was read too early
    assert (recorder.logs, recorder.saves) == ([2, 4, 6, 8], [4])
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["step"]) == ("failed", 8)


@pytest.mark.parametrize(
    ("options", "last"),
    [({}, 12), (steps("save", 8), 8), (steps("eval", 9), 9), ({"stop_on_nan": 1, **steps("logging", 1)}, 5)],
)
def test_saves_evaluations_and_the_end_look_too(tmp_path: Path, options: dict[str, Any], last: int) -> None:
    made, recorder = trainer(tmp_path, Breaks(5), **options)
    with pytest.raises(TrainingDiverged, match="step 5"):
        made.train(save_model=True)
    assert made.state.global_step == last
    assert recorder.saves == recorder.evaluations == []
    assert not list(tmp_path.glob("*.safetensors"))


class Stops(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 7


@pytest.mark.parametrize("last", [12, 7])
def test_a_run_whose_last_step_is_nan_does_not_end_well(tmp_path: Path, last: int) -> None:
    """Fewer steps than stop_on_nan, but its model is of no use, and is not saved."""
    made, recorder = trainer(tmp_path, Breaks(last), **steps("save", last), **steps("logging", 100))
    if last == 7:
        made.add_callback(Stops)
    with pytest.raises(TrainingDiverged, match=f"step {last}"):
        made.train(save_model=True)
    assert recorder.saves == []


def test_the_best_model_stands_where_the_last_step_is_nan(tmp_path: Path) -> None:
    options = {"load_best_model_at_end": True, **steps("save", 4), **steps("eval", 4)}
    made, _ = trainer(tmp_path, Breaks(12), **options)
    made.train()
    assert made.state.best_global_step in (4, 8)
    assert all(each.isfinite().all() for each in made.model.parameters())


def test_a_checkpoint_of_nan_is_not_the_best_and_keeps_the_last_that_is_finite(tmp_path: Path) -> None:
    """Also by a metric that is better for weights of no use."""
    best = {"metric_for_best_model": "useless", "greater_is_better": True, "save_total_limit": 1, "stop_on_nan": 0}
    made, recorder = trainer(tmp_path, Breaks(7), **best, **steps("save", 2), **steps("eval", 2))
    made.compute_metrics = lambda found: {"useless": made.state.global_step}
    made.train()
    assert recorder.saves == [2, 4, 6, 8, 10, 12]
    assert made.state.best_global_step == 6
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-12", "checkpoint-6"]
    loop = trainer(tmp_path, **{**best, "max_steps": 14}, **steps("save", 13), **steps("eval", 13))[0]
    loop.compute_metrics = lambda found: {"useless": 99}
    loop.train(resume_from_checkpoint=str(tmp_path / "checkpoint-12"))
    assert loop.state.best_global_step == 6
    assert (tmp_path / "checkpoint-6").is_dir()


class AddsToCheckpoint(TrainerCallback):
    """Writes into the folder of the checkpoint, as callbacks for transformers do."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.found.append((folder / "manifest.json").is_file())
        folder.mkdir(exist_ok=True)
        (folder / "notes.txt").write_text(f"step {state.global_step}")


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_a_callback_adds_to_a_checkpoint_is_there(tmp_path: Path, asynchronous: bool) -> None:
    callback = AddsToCheckpoint()
    run(tmp_path, callback, async_save=asynchronous, max_steps=6, **steps("save", 2))
    assert callback.found == [True, True, True]
    for step in (2, 4, 6):
        assert (tmp_path / f"checkpoint-{step}" / "notes.txt").read_text() == f"step {step}"
        assert call(["verify", str(tmp_path / f"checkpoint-{step}")]) == 0


def test_callbacks_may_iterate_the_loader_that_they_get(tmp_path: Path) -> None:
    class Reads(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
            next(iter(train_dataloader))

    weights = []
    for name, callbacks in (("alone", []), ("read", [Reads()])):
        for last in (3, 8):
            fields = {"max_steps": 8, "resume_from_checkpoint": True, **steps("save", 3)}
            made, _ = trainer(tmp_path / name, StopsAt(last), *callbacks, **fields)
            made.train()
        weights.append(made.model.state_dict())
    assert all((weights[0][key] == value).all() for key, value in weights[1].items())


class Fails(TrainerCallback):
    """Raises an error at this step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise KeyError("absent")


def test_a_callback_that_fails_is_named_with_its_line(tmp_path: Path) -> None:
    made, _ = trainer(tmp_path, Fails(2))
    with pytest.raises(KeyError):
        made.train()
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["reason"].startswith("KeyError: 'absent' (")
    assert "test_training_loop.py, line " in status["reason"]
    assert status["reason"].endswith(", in on_step_end)")
    assert "on_step_end" in (tmp_path / "failures" / "rank-0.txt").read_text()


def metrics_of(fails: Any) -> Any:
    """A metrics function that fails where `fails` says so of the number of its samples and calls."""
    calls: list[int] = []

    def compute(found: Any) -> dict[str, float]:
        calls.append(len(found.predictions))
        if fails(calls):
            raise IndexError("no such class")
        return {"count": float(calls[-1])}

    compute.calls = calls  # type: ignore[attr-defined]
    return compute


BOTH = {**steps("save", 2), **steps("eval", 2), "max_steps": 4}


def test_a_metrics_function_is_called_by_evaluations_alone_and_fails_before_training_if_they_begin_there(
    tmp_path: Path,
) -> None:
    """It may keep sums."""
    made, recorder = trainer(tmp_path, **BOTH)
    made.compute_metrics = metrics_of(lambda calls: calls[-1] < 3)
    made.train()
    assert recorder.evaluations == [2, 4]
    assert made.compute_metrics.calls == [3, 3]
    made, recorder = trainer(tmp_path / "start", eval_on_start=True, **BOTH)
    made.compute_metrics = metrics_of(lambda calls: True)
    with pytest.raises(IndexError):
        made.train()
    assert (made.state.global_step, recorder.order) == (0, [])
    assert ", in compute)" in (tmp_path / "start" / "failures" / "rank-0.txt").read_text().splitlines()[0]


@pytest.mark.parametrize("async_save", [True, False])
def test_what_was_trained_is_saved_where_the_metrics_of_the_step_fail(tmp_path: Path, async_save: bool) -> None:
    made, _ = trainer(tmp_path, async_save=async_save, **BOTH)
    made.compute_metrics = metrics_of(lambda calls: len(calls) > 1)
    with pytest.raises(IndexError):
        made.train()
    assert (tmp_path / "checkpoint-4").is_dir()
    again, recorder = trainer(tmp_path, **BOTH)
    again.compute_metrics = metrics_of(lambda calls: False)
    again.train(resume_from_checkpoint=True)
    assert recorder.order == ["evaluate 4", "save 4"]


class FailsInEvaluation(TrainerCallback):
    """As a callback that uploads metrics."""

    def __init__(self, event: str) -> None:
        setattr(self, event, self.fail)

    def fail(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 4:
            raise ConnectionError("no answer")


@pytest.mark.parametrize("event", ["on_evaluate", "on_prediction_step"])
def test_what_was_trained_is_saved_where_a_callback_of_the_evaluation_fails(tmp_path: Path, event: str) -> None:
    made, _ = trainer(tmp_path, FailsInEvaluation(event), **BOTH)
    with pytest.raises(ConnectionError):
        made.train()
    assert (tmp_path / "checkpoint-4").is_dir()
    recorder = run(tmp_path, resume_from_checkpoint=True, **BOTH)
    assert recorder.order[-1] == "save 4"


class IsInterrupted(TrainerCallback):
    """Ends the process as a signal does, where training begins."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        raise RunInterrupted("SIGTERM: stopping")


def test_a_finished_run_that_is_interrupted_while_it_starts_again_stays_done(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 2, **steps("save", 2)}
    run(tmp_path, **options)
    record_interruption(tmp_path, "SIGTERM: not training", time.time())
    again, _ = trainer(tmp_path, IsInterrupted(), **options)
    with pytest.raises(RunInterrupted):
        again.train(resume_from_checkpoint=True)
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "done"
    longer, _ = trainer(tmp_path, IsInterrupted(), **{**options, "max_steps": 4})
    with pytest.raises(RunInterrupted):
        longer.train(resume_from_checkpoint=True)
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "interrupted"


def test_the_start_says_what_was_started(tmp_path: Path) -> None:
    run(tmp_path, max_steps=1, seed=7)
    (started,) = [each for each in read_lines(tmp_path / "events.jsonl") if each["event"] == "started"]
    # The command of this very process: a worker of pytest-xdist has another one.
    assert started["command"] == shlex.join(sys.orig_argv)
    assert (started["seed"], started["host"]) == (7, socket.gethostname())
    assert started["commit"] is None or len(started["commit"]) == 40
