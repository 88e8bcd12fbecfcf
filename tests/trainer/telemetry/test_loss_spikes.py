"""Loss spikes: the rule, and that a run warns of them or goes back before them, bit for bit."""

from __future__ import annotations

import gc
import json
import math
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import TrainerCallback

from stepmark import Trainer, TrainingArguments
from stepmark.cli.main import run as call
from stepmark.data.loader.batch import StepBatch
from stepmark.errors import TrainingDiverged, UsageError
from stepmark.filesystem.json_files import read_lines
from stepmark.trainer import training_loop
from stepmark.trainer.resume import restore_run
from stepmark.trainer.telemetry.anomalies import SpikeDetector
from tests.support.programs import Blocks, tiny_model
from tests.support.ranks import Ranks

HERE = "tests.trainer.telemetry.test_loss_spikes"
SPIKES = {"loss_spike_window": 8, "loss_spike_threshold": 6.0}


def test_the_rule() -> None:
    """Two deviations of ten numbers, of which half are needed; the other number and the lower side are no reason."""
    rule = SpikeDetector(10, 2.0)
    past = [4.0, 5.0, 4.0, 5.0]
    assert not any(rule.judge(loss, 1.0) for loss in [*past, 100.0])  # the fifth is compared with too few
    rule = SpikeDetector(8, 2.0)
    assert not any(rule.judge(loss, 1.0) for loss in past)
    limit = 4.5 + 2 * torch.tensor(past).std().item()  # one of a sample
    for value, spikes in ((limit + 1e-5, True), (limit - 1e-5, False), (0.0, False)):
        copy = SpikeDetector(8, 2.0)
        copy.load_state_dict(json.loads(json.dumps(rule.state_dict())))
        assert (copy.judge(value, 1.0) is not None) is spikes
    assert rule.judge(4.5, 1.1) == "grad_norm 1.1, after 1 ± 0 in 4 steps"
    assert rule.judge(math.nan, 1.0) == "loss nan"
    assert len(rule.state_dict()["past"]["loss"]) == 5  # nan is never part of the window
    lasting = SpikeDetector(8, 6.0)
    told = [lasting.judge(loss, 1.0) is not None for loss in [*past, *past, *[9.0, 9.1] * 8]]
    assert told.index(True) == 8
    assert not any(told[-8:])


class Weights(TrainerCallback):
    """The first weight after every step, by step; of steps that are trained again the last."""

    def __init__(self) -> None:
        self.values: dict[int, torch.Tensor] = {}
        self.order: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        self.values[state.global_step] = next(known["model"].parameters()).detach().clone()
        self.order.append(state.global_step)


class Stops(Exception):
    pass


class StopsAt(TrainerCallback):
    def __init__(self, step: int, times: int) -> None:
        self.step, self.times = step, times

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.times -= state.global_step == self.step
        if not self.times:
            raise Stops


class Rigged(Blocks):
    """Samples of which some have a loss that is a hundred times too high."""

    def __init__(self, *bad: int) -> None:
        super().__init__(64, ragged=False)
        self.labels[:, 0] = 0
        self.labels[list(bad), 0] = 1


def exploding(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs.logits[:, 1:].flatten(0, 1).float()
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
    return loss * (100.0 if bool(labels[:, 0].any()) else 1.0)


def train(folder: Path, *bad: int, callbacks: Any = (), **fields: Any) -> Weights:
    """Thirty steps of two samples, in order: sample 2n and 2n + 1 in step n + 1."""
    told = Weights()
    settings: dict[str, Any] = {"max_steps": 30, "per_device_train_batch_size": 2, "learning_rate": 1e-3}
    settings |= {"train_sampling_strategy": "sequential", "logging_steps": 2, "save_steps": 4, "async_save": False}
    settings |= {"disable_tqdm": True, "device": "cpu", "output_dir": str(folder), **fields}
    arguments = TrainingArguments(**settings)
    data = Rigged(*bad)
    Trainer(
        tiny_model(), arguments, train_dataset=data, compute_loss_func=exploding, callbacks=[told, *callbacks]
    ).train()
    return told


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    return [line for line in read_lines(folder / "events.jsonl") if line["event"] in kinds]


def test_a_warning_changes_nothing(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", 20, 41)
    warned = train(tmp_path / "warned", 20, 41, on_loss_spike="warn", **SPIKES)
    found = events(tmp_path / "warned", "trouble")
    assert [(event["kind"], event["step"]) for event in found] == [("loss_spike", 11), ("loss_spike", 21)]
    assert "step 11 is a loss spike: loss " in found[0]["message"]
    assert not events(tmp_path / "plain", "trouble")
    assert all(torch.equal(plain.values[step], warned.values[step]) for step in plain.values)


def test_a_run_that_never_is_finite_still_stops(tmp_path: Path) -> None:
    class Nan(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            if state.global_step == 4:
                next(known["model"].parameters()).data.fill_(math.nan)

    with pytest.raises(TrainingDiverged, match="since step 5 nothing is finite"):
        train(tmp_path, on_loss_spike="warn", callbacks=[Nan()], **SPIKES)


def test_a_batch_of_a_spike_is_not_kept(tmp_path: Path) -> None:
    class Counts(TrainerCallback):
        found: ClassVar[list[int]] = []

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            gc.collect()
            self.found.append(sum(type(each) is StepBatch for each in gc.get_objects()))

    train(tmp_path, 20, on_loss_spike="rollback", callbacks=[Counts()], **SPIKES)
    assert len(Counts.found) > 30
    assert Counts.found[-1] == Counts.found[2]


def test_a_run_goes_back_and_leaves_the_samples_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Step 11 is a spike, which the log of step 12 shows: the run goes on at step 9 with the samples of step 12. The
    next spike, sample 41, would have been in step 21, and is in step 18."""
    whole = train(tmp_path / "whole", 20, 41, on_loss_spike="rollback", **SPIKES)
    assert whole.order == [*range(1, 13), *range(9, 19), *range(17, 31)]
    found = events(tmp_path / "whole", "rolled_back")
    assert [(event["step"], event["first"], event["last"]) for event in found] == [(8, 11, 11), (16, 18, 18)]
    positions = [event["loader"]["samples"] for event in events(tmp_path / "whole", "position")]
    assert positions == [0, 22, 42]
    resumed = [line["resumed"] for line in read_lines(tmp_path / "whole" / "metrics.jsonl") if "resumed" in line]
    assert resumed == [8, 16]
    capsys.readouterr()
    for options, samples in ((["11", "--attempt", "0"], [20, 21]), (["9"], [22, 23]), (["17"], [42, 43])):
        assert call(["rows", str(tmp_path / "whole"), "--json", "--step", *options]) == 0
        assert [row["sample"] for row in json.loads(capsys.readouterr().out)["rows"]] == samples

    for name, last, more in (("cut", 8, {}), ("snapshots", 9, {"memory_every": 1})):
        with pytest.raises(Stops):  # after going back, before anything is saved
            train(tmp_path / name, 20, 41, on_loss_spike="rollback", callbacks=[StopsAt(10, 2)], **SPIKES, **more)
        assert [event["step"] for event in events(tmp_path / name, "rolled_back")] == [8]
        again = train(tmp_path / name, 20, 41, on_loss_spike="rollback", resume_from_checkpoint=True, **SPIKES, **more)
        assert again.order[0] == last + 1
        assert all(torch.equal(again.values[step], whole.values[step]) for step in again.values)

    with pytest.raises(TrainingDiverged, match=r"step 18 is a loss spike after 1 rollbacks .*checkpoint-16 is from"):
        train(tmp_path / "limited", 20, 41, on_loss_spike="rollback", max_rollbacks=1, **SPIKES)


def test_the_time_of_going_back_counts_once_and_in_no_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(*given: Any) -> Any:
        time.sleep(2.0)
        return restore_run(*given)

    monkeypatch.setattr(training_loop, "restore_run", slowly)
    began = time.monotonic()
    train(tmp_path, 20, on_loss_spike="rollback", **SPIKES)
    spent = json.loads((tmp_path / "status.json").read_text())["time_spent"]
    assert spent["restoring"] >= 2.0
    assert sum(spent.values()) - spent["starting"] <= time.monotonic() - began
    lines = read_lines(tmp_path / "metrics.jsonl")
    (at,) = (index for index, line in enumerate(lines) if "resumed" in line)
    after = lines[at + 1]
    assert after["samples_per_second"] * (after["seconds_step"] + after["seconds_data"]) == pytest.approx(4.0, rel=0.1)
    assert after["time"] - lines[at - 1]["time"] >= 2.0 + after["seconds_step"]


def test_without_a_checkpoint_the_run_goes_on(tmp_path: Path) -> None:
    told = train(tmp_path, 20, on_loss_spike="rollback", **SPIKES, save_steps=14)
    assert told.order == list(range(1, 31))
    assert [event["kind"] for event in events(tmp_path, "trouble")] == ["loss_spike", "not_rolled_back"]


def on_ranks(folder: str) -> list[int]:
    """One sample a rank: step n has samples 2n - 2 and 2n - 1, as above."""
    return train(Path(folder), 20, 41, per_device_train_batch_size=1, on_loss_spike="rollback", **SPIKES).order


def test_all_ranks_go_back(tmp_path: Path, ranks: Ranks) -> None:
    first, second = ranks.run(f"{HERE}:on_ranks", str(tmp_path), nproc=2).check()
    assert first == second == [*range(1, 13), *range(9, 19), *range(17, 31)]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"on_loss_spike": "skip"}, "skip is gone; use rollback"),
        ({"on_loss_spike": "rollback", "save_strategy": "no"}, "on_loss_spike and save_strategy: a rollback needs"),
        ({"on_loss_spike": "rollback", "save_only_model": True}, "on_loss_spike and save_only_model: "),
        ({"loss_spike_window": 9}, "loss_spike_window and on_loss_spike: is None"),
        ({"on_loss_spike": "warn", "max_rollbacks": 9}, "max_rollbacks and on_loss_spike: is warn"),
        ({"on_loss_spike": "stop"}, "choose one of warn, rollback"),
    ],
)
def test_what_cannot_be(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        TrainingArguments(**{"output_dir": str(tmp_path), "device": "cpu", **fields})
