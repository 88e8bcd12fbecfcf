"""When a run logs, evaluates, saves and stops; told by a callback of real runs of a tiny model."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, PrinterCallback, ProgressCallback, TrainerCallback

from stepmark import Trainer, TrainingArguments
from stepmark.errors import UsageError
from tests.support.programs import Blocks, tiny_model

SAMPLES = 10  # 5 steps an epoch
NAN = float("nan")
NEVER = {"logging_strategy": "no", "save_strategy": "no", "eval_strategy": "no"}


class Recorder(TrainerCallback):
    """The steps at which things happened."""

    def __init__(self) -> None:
        self.logs: list[int] = []
        self.evaluations: list[int] = []
        self.saves: list[int] = []
        self.epochs: list[int] = []
        self.order: list[str] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.logs.append(state.global_step)
            self.order.append(f"log {state.global_step}")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.evaluations.append(state.global_step)
        self.order.append(f"evaluate {state.global_step}")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.saves.append(state.global_step)
        self.order.append(f"save {state.global_step}")

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.epochs.append(state.global_step)


class Losses(TrainerCallback):
    """Replaces what evaluations find by losses of a script, before anything follows them."""

    def __init__(self, losses: list[float]) -> None:
        self.losses = iter(losses)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        metrics["eval_loss"] = next(self.losses)


def trainer(folder: Path, *callbacks: TrainerCallback, **options: Any) -> tuple[Trainer, Recorder]:
    recorder = Recorder()
    args = TrainingArguments(
        **{
            "output_dir": str(folder),
            "max_steps": 12,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-3,
            "disable_tqdm": True,
            "device": "cpu",
            **NEVER,
            **options,
        }
    )
    made = Trainer(
        tiny_model(),
        args,
        train_dataset=Blocks(SAMPLES),
        eval_dataset=Blocks(3, seed=1),
        callbacks=[*callbacks, recorder],
    )
    return made, recorder


def run(folder: Path, *callbacks: TrainerCallback, **options: Any) -> Recorder:
    made, recorder = trainer(folder, *callbacks, **options)
    made.train()
    return recorder


def steps(name: str, interval: float) -> dict[str, Any]:
    return {f"{name}_strategy": "steps", f"{name}_steps": interval}


def test_never(tmp_path: Path) -> None:
    recorder = run(tmp_path)
    assert (recorder.logs, recorder.evaluations, recorder.saves) == ([], [], [])
    assert recorder.epochs == [5, 10, 12]
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "done"


EPOCH = dict.fromkeys(("logging_strategy", "eval_strategy", "save_strategy"), "epoch")


@pytest.mark.parametrize(
    ("options", "logs", "evaluations", "saves"),
    [
        ({**steps("logging", 3), **steps("eval", 5), **steps("save", 5)}, [3, 6, 9, 12], [5, 10, 12], [5, 10, 12]),
        ({"max_steps": 6, **steps("eval", 3), **steps("save", 3)}, [], [3, 6], [3, 6]),  # the last step counts once
        ({**steps("eval", 5), "eval_delay": 7}, [], [10, 12], []),
        ({"eval_strategy": "epoch", "eval_delay": 2}, [], [10, 12], []),
        (EPOCH, [5, 10, 12], [5, 10, 12], [5, 10, 12]),  # also where max_steps ends the run inside an epoch
        ({**EPOCH, "max_steps": 10}, [5, 10], [5, 10], [5, 10]),
        # fractions of all steps, rounded up: 0.3 * 12 = 3.6
        ({**steps("logging", 0.3), **steps("eval", 0.5), **steps("save", 0.9)}, [4, 8, 12], [6, 12], [11, 12]),
        ({"logging_first_step": True, **steps("logging", 5)}, [1, 5, 10], [], []),
        ({"eval_on_start": True, "max_steps": 2, "eval_strategy": "epoch"}, [], [0, 2], []),
    ],
)
def test_when_a_run_logs_evaluates_and_saves(
    tmp_path: Path, options: dict[str, Any], logs: list[int], evaluations: list[int], saves: list[int]
) -> None:
    recorder = run(tmp_path, **options)
    assert (recorder.logs, recorder.evaluations, recorder.saves) == (logs, evaluations, saves)


def test_log_then_evaluation_then_save(tmp_path: Path) -> None:
    recorder = run(tmp_path, max_steps=2, **steps("logging", 2), **steps("eval", 2), **steps("save", 2))
    assert recorder.order == ["log 2", "evaluate 2", "save 2"]


@pytest.mark.parametrize(("limit", "epochs", "total"), [(-1, 2.0, 10), (-1, 0.5, 3), (-1, 1.3, 7), (7, 1.0, 7)])
def test_epochs_in_place_of_steps_unless_max_steps_is_given(
    tmp_path: Path, limit: int, epochs: float, total: int
) -> None:
    made, recorder = trainer(tmp_path, max_steps=limit, num_train_epochs=epochs)
    assert made.train().global_step == total
    assert recorder.epochs[-1] == total
    assert made.state.max_steps == total


def test_a_callback_may_ask_for_anything_and_stop_the_run(tmp_path: Path) -> None:
    class Asks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_log = control.should_evaluate = control.should_save = state.global_step == 3
            control.should_training_stop |= state.global_step == 4
            return control

    recorder = run(tmp_path, Asks())
    assert (recorder.logs, recorder.evaluations, recorder.saves, recorder.epochs) == ([3], [3], [3], [4])


@pytest.mark.parametrize(
    ("losses", "greater", "saves"),
    [([5.0, 4.0, 4.5, 3.0, 3.0, 3.5], None, [2, 4, 8]), ([5.0, 4.0, 6.0], True, [4, 12])],
)
def test_only_better_models_are_saved(
    tmp_path: Path, losses: list[float], greater: bool | None, saves: list[int]
) -> None:
    best = {"save_strategy": "best", "metric_for_best_model": "loss", "greater_is_better": greater}
    options = {**best, **steps("eval", 12 // len(losses))}
    recorder = run(tmp_path, Losses(losses), **options)
    assert len(recorder.evaluations) == len(losses)
    assert recorder.saves == saves


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    script = Losses([5.0, 3.0, 4.0])
    options = {**steps("eval", 4), **steps("save", 4), "load_best_model_at_end": True, "save_total_limit": 1}
    made, recorder = trainer(tmp_path, script, **options)
    made.train()
    assert recorder.saves == [4, 8, 12]
    assert made.state.best_model_checkpoint == str(tmp_path / "checkpoint-8")
    assert (made.state.best_metric, made.state.best_global_step) == (3.0, 8)
    kept = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert kept == ["checkpoint-12", "checkpoint-8"]  # the best stays, whatever the limit
    weights = load_file(tmp_path / "checkpoint-8" / "model.safetensors")
    state = made.model.state_dict()
    assert all((state[name] == value).all() for name, value in weights.items())


class Interrupted(Losses):
    """The first evaluation fails, once."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        if self.losses is not None:
            losses, self.losses = self.losses, None  # type: ignore[assignment]
            self.after = losses
            raise KeyboardInterrupt
        metrics["eval_loss"] = next(self.after)


@pytest.mark.parametrize("kind", [Losses, Interrupted])
def test_the_best_is_kept_that_was_saved_before_it_was_evaluated(tmp_path: Path, kind: type[Losses]) -> None:
    """A step is saved before the end of its epoch is evaluated: what was saved knows nothing of its metric."""
    options = {**steps("save", 5), "eval_strategy": "epoch", "save_total_limit": 1, "metric_for_best_model": "loss"}
    made, recorder = trainer(tmp_path, kind([3.0, 4.0, 5.0]), **options)
    if kind is Interrupted:
        with pytest.raises(KeyboardInterrupt):
            made.train()
        assert (made.state.global_step, recorder.saves) == (5, [5])
        recorder.saves.clear()
    made.train(resume_from_checkpoint=True)
    assert recorder.saves == ([5, 10, 12] if kind is Interrupted else [5, 5, 10, 12])
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-12", "checkpoint-5"]
    assert made.state.best_model_checkpoint == str(tmp_path / "checkpoint-5")


@pytest.mark.parametrize(("quiet", "kind"), [(True, PrinterCallback), (False, ProgressCallback)])
def test_a_run_shows_nothing_without_the_callback_that_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], quiet: bool, kind: type[TrainerCallback]
) -> None:
    made, _ = trainer(tmp_path / "shown", **steps("logging", 4), disable_tqdm=quiet)
    names = [type(each).__name__ for each in made.callback_handler.callbacks]
    assert names == ["DefaultFlowCallback", kind.__name__, "Recorder"]  # as in transformers
    made.train()
    assert "step 4/12" in capsys.readouterr().err
    made, recorder = trainer(tmp_path / "silent", **steps("logging", 4), disable_tqdm=quiet)
    made.remove_callback(kind)
    made.train()
    assert recorder.logs == [4, 8, 12]
    assert "step 4/12" not in capsys.readouterr().err


def test_an_evaluation_of_the_best_model_is_one_of_its_step(tmp_path: Path) -> None:
    options = {**steps("eval", 4), **steps("save", 4), "load_best_model_at_end": True}
    made, _ = trainer(tmp_path, Losses([5.0, 3.0, 4.0]), **options)
    made.train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    known = {line["step"]: (line["eval_loss"], line["epoch"]) for line in lines if "eval_loss" in line}
    removed = made.pop_callback(Losses)
    assert isinstance(removed, Losses)
    made.add_callback(removed)
    made.remove_callback(Losses)
    found = made.evaluate()
    again = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert len(set(known.values())) == 3
    assert (again["step"], again["eval_loss"], again["epoch"]) == (8, *known[8])
    assert (found["eval_loss"], found["epoch"]) == known[8]
    assert made.state.log_history[-1]["step"] == 8
    assert made.final_evaluation() == found


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        (
            {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
            r"the global batch was 2 samples and is now 4 \(1 per device x.*set gradient_accumulation_steps: 2",
        ),
        ({"per_device_train_batch_size": 3}, "to keep it, set per_device_train"),
        ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}, None),
    ],
)
def test_steps_of_another_size_are_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], warning: str | None
) -> None:
    run(tmp_path, **steps("save", 4), max_steps=4)
    made, _ = trainer(tmp_path, max_steps=5, **options)
    made.train(resume_from_checkpoint=True)
    assert re.search(warning, caplog.text) if warning else "the global batch was" not in caplog.text


@pytest.mark.parametrize("losses", [[5.0, 4.0, 4.5, 4.6, 1.0, 1.0], [NAN, NAN, NAN, NAN], [NAN, 4.0, NAN, NAN]])
def test_early_stopping(tmp_path: Path, losses: list[float]) -> None:
    """A first loss that is nan counts as in transformers."""
    script = Losses(losses)
    options = {**steps("eval", 2), **steps("save", 2), "load_best_model_at_end": True}
    recorder = run(tmp_path, script, EarlyStoppingCallback(early_stopping_patience=2), **options)
    assert recorder.evaluations == ([2, 4, 6] if losses[1] is NAN else [2, 4, 6, 8])


class Fails(TrainerCallback):
    """Ends a process between the last save of its run and the run's end."""

    def on_train_end(self, *_: Any, **__: Any) -> None:
        raise OSError("gone")


def test_a_run_that_was_stopped_by_a_callback_has_ended_whenever_it_is_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes on where it is given more steps."""
    options = {**steps("eval", 2), **steps("save", 2), "load_best_model_at_end": True, "max_steps": 12}

    def resumed(*callbacks: TrainerCallback, **more: int) -> Recorder:
        made, recorder = trainer(tmp_path, *callbacks, EarlyStoppingCallback(2), **{**options, **more})
        made.train(resume_from_checkpoint=True)
        return recorder

    with pytest.raises(OSError, match="gone"):
        resumed(Losses([5.0, 4.0, 4.5, 4.6]), Fails())
    for _ in range(2):
        caplog.clear()
        assert resumed(Losses([])).evaluations == []
        assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 8
        assert "has ended the run at step 8; raise max_steps" in caplog.text
    assert resumed(Losses([1.0, 1.0, 1.0]), max_steps=14).evaluations == [10, 12, 14]


@pytest.mark.parametrize(("event", "trained"), [("on_train_begin", 0), ("on_epoch_begin", 5), ("on_epoch_end", 5)])
def test_no_step_is_trained_after_a_callback_has_stopped_the_run(tmp_path: Path, event: str, trained: int) -> None:
    class Stops(TrainerCallback):
        pass

    def stop(_: Any, args: Any, state: Any, control: Any, **__: Any) -> None:
        control.should_training_stop |= state.global_step == trained

    setattr(Stops, event, stop)
    made, _ = trainer(tmp_path, Stops())
    made.train()
    assert made.state.global_step == trained


def test_a_learning_rate_that_follows_the_metric(tmp_path: Path) -> None:
    script = Losses([5.0, 6.0, 6.0, 6.0])
    options = {"lr_scheduler_kwargs": {"patience": 0, "factor": 0.1}, **steps("eval", 3), **steps("logging", 1)}
    run(tmp_path, script, lr_scheduler_type="reduce_lr_on_plateau", **options)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rates = {line["step"]: line["learning_rate"] for line in lines if "loss" in line}
    assert [rates[step] for step in (3, 6, 7, 9, 10, 12)] == pytest.approx([1e-3, 1e-3, 1e-4, 1e-4, 1e-5, 1e-5])


class Rates(TrainerCallback):
    """The rates that the optimizer uses, by step."""

    def __init__(self) -> None:
        self.used: dict[int, float] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        self.used[state.global_step + 1] = known["optimizer"].param_groups[0]["lr"]


def test_a_log_has_the_rate_of_its_step(tmp_path: Path) -> None:
    rates = Rates()
    made, _ = trainer(tmp_path, rates, warmup_steps=3, lr_scheduler_type="cosine", **steps("logging", 1))
    made.train()
    logged = {log["step"]: log["learning_rate"] for log in made.state.log_history if "loss" in log}
    assert logged == rates.used
    assert len(set(logged.values())) > 10


def test_a_log_after_a_resumption_has_the_rate_of_the_step_before(tmp_path: Path) -> None:
    """The checkpoint was saved at the end of an epoch, before the epoch's log."""
    options = {"logging_strategy": "epoch", **steps("save", 5)}
    complete, _ = trainer(tmp_path / "complete", **options)
    complete.train()
    shutil.copytree(tmp_path / "complete" / "checkpoint-5", tmp_path / "resumed" / "checkpoint-5")
    resumed, _ = trainer(tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=True)
    found = [[log["learning_rate"] for log in each.state.log_history if "loss" in log] for each in (complete, resumed)]
    assert found[0] == found[1]


def test_samples_in_their_own_order(tmp_path: Path) -> None:
    seen: list[int] = []

    class Noted(Blocks):
        def __getitem__(self, index: int) -> dict[str, Any]:
            seen.append(index)
            return super().__getitem__(index)

    made, _ = trainer(tmp_path, max_steps=3, train_sampling_strategy="sequential")
    made.train_dataset = Noted(SAMPLES)
    made.train()
    assert seen[:6] == list(range(6))


def test_an_unknown_order_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="train_sampling_strategy: 'by_length' is unknown; choose one of random"):
        trainer(tmp_path, train_sampling_strategy="by_length")


@pytest.mark.parametrize(
    ("call", "culprit"),
    [
        (lambda folder: Trainer("gpt2", arguments(folder)), "model: .*gpt2"),
        (lambda folder: Trainer(type(tiny_model()), arguments(folder)), "model: .*class"),
        (lambda folder: Trainer(tiny_model(), Blocks(3)), "args: .*Blocks"),
        (lambda folder: Trainer(arguments(folder), tiny_model()), "args: |model: "),
        (lambda folder: Trainer(tiny_model(), {"output_dir": str(folder)}), "args: .*dict"),
    ],
)
def test_arguments_of_the_wrong_kind_are_named(tmp_path: Path, call: Any, culprit: str) -> None:
    with pytest.raises(UsageError, match=culprit):
        call(tmp_path)


def arguments(folder: Path) -> TrainingArguments:
    return TrainingArguments(output_dir=str(folder), device="cpu")
