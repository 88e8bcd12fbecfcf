"""Where the time of a run goes, over its attempts."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from stepmark import Trainer
from stepmark.checkpoint.format.manifest import read_manifest
from stepmark.report.history import read_history
from stepmark.report.summary import tiles
from stepmark.trainer.run_folder import time_spent
from stepmark.trainer.run_folder.run_log import read_metrics
from stepmark.trainer.run_folder.time_spent import KEPT, PARTS, TIME_SPENT, TimeSpent, seconds_in
from tests.support.ranks import Ranks
from tests.trainer.test_user_changes import Changes, freeze, make

STEP = {"step": 3.0, "data": 1.0, "save": 0.5, "evaluation": 0.25}, {"compiling": 0.75, "waiting": 0.25}
NOTHING = {"step": 0.0, "data": 0.0}, {}


class Clock:
    """The time, and when this process began."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.process_began = 1000.0, 1000.0
        monkeypatch.setattr(time_spent.time, "time", lambda: self.now)
        monkeypatch.setattr(time_spent, "process_age", lambda: self.now - self.process_began)


def attempt(clock: Clock, status: dict[str, Any], starting: float, restored: tuple[float, float | None]) -> TimeSpent:
    """A process that began `starting` seconds ago and has restored for some of them."""
    clock.process_began = clock.now
    clock.now += starting
    found = TimeSpent(status)
    found.restored(*restored)
    found.begin()
    return found


def test_seconds_add_up_over_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    first = attempt(clock, {}, 10.0, (0.0, 0.0))
    clock.now += 4.75
    first.add(*STEP)
    saved = first.kept(*NOTHING)
    clock.now += 4.75
    status = {**first.add(*STEP), "time": clock.now + 6}  # written again, for a save, before the next log
    clock.now += 20  # killed, and started again
    second = attempt(clock, status, 7.0, (2.0, saved))
    clock.now += 4.75
    found = seconds_in(second.add(*STEP))
    expected = {
        "kept": 6.0,
        "repeated": 3.0,
        "compiling": 2.25,
        "waiting": 0.75,
        "saving": 1.5,
        "evaluating": 0.75,
        "restoring": 2.0,
        "starting": 15.0,
    }
    assert found == pytest.approx({**expected, "stopped": 20.0})
    assert sum(found.values()) == pytest.approx(clock.now - 1000)


def test_a_checkpoint_that_says_nothing_keeps_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    status = {"time": clock.now, **attempt(clock, {}, 1.0, (0.0, 0.0)).add(*STEP)}
    found = attempt(clock, status, 1.0, (0.5, None))
    assert (found.seconds["kept"], found.seconds["repeated"]) == (3.0, 0.0)


@pytest.mark.parametrize(("state", "stopped"), [("running", 500.0), ("interrupted", 500.0), ("done", 0.0)])
def test_nobody_waits_for_a_run_that_is_done(monkeypatch: pytest.MonkeyPatch, state: str, stopped: float) -> None:
    clock = Clock(monkeypatch)
    first = attempt(clock, {}, 1.0, (0.0, 0.0))
    status = {"state": state, "time": clock.now, **first.add(*STEP)}
    clock.now += 500
    assert attempt(clock, status, 1.0, (0.5, None)).seconds["stopped"] == stopped


def test_another_training_of_the_same_process_counts_no_second_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    first = attempt(clock, {}, 1.0, (0.0, 0.0))
    clock.now += 4.75
    status = {"time": clock.now, **first.add(*STEP)}
    clock.now += 3
    again = TimeSpent(status)
    again.restored(0.0, None)
    again.begin()
    assert sum(again.seconds.values()) == pytest.approx(clock.now - 1000)


@pytest.mark.parametrize(
    "content", [None, [], 7, {"kept": "x", "saving": -1, "stopped": 10**400}, {"kept": float("nan")}]
)
def test_a_status_of_another_kind_counts_as_nothing(content: Any) -> None:
    assert not any(seconds_in({TIME_SPENT: content}).values())


def kill(trainer: Trainer) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(folder: str, killed: int | None, resumes: bool) -> None:
    """`killed`: after this step, before its log."""
    change = Changes(freeze) if killed is None else Changes(kill, killed)
    make(folder, None, change, async_save=False).train(resume_from_checkpoint=resumes)


def test_a_resumed_run_knows_the_time_of_all_its_attempts(ranks: Ranks, tmp_path: Path) -> None:
    """Killed after step 5, it goes on from step 3, and is killed again before its first log."""
    began = time.time()
    assert ranks.run(train, str(tmp_path), 5, False).codes == [-signal.SIGKILL]
    first = seconds_in(json.loads((tmp_path / "status.json").read_text()))
    assert ranks.run(train, str(tmp_path), 4, True).codes == [-signal.SIGKILL]
    ranks.run(train, str(tmp_path), None, True).check()
    found = seconds_in(json.loads((tmp_path / "status.json").read_text()))
    assert list(found) == list(PARTS)
    kept = read_manifest(tmp_path / "checkpoint-3").metadata[KEPT]
    assert 0 < kept < first["kept"]
    assert found["repeated"] == pytest.approx(first["kept"] - kept)
    assert min(found[part] for part in ("kept", "saving", "restoring", "starting", "stopped")) > 0
    logged = [line["time"] for line in read_metrics(tmp_path)]
    assert logged[-1] - logged[0] <= sum(found.values()) <= time.time() - began
    shown = {name: value for name, value, _ in tiles(read_history(tmp_path), [])}
    assert shown["Goodput"] == f"{found['kept'] / sum(found.values()):.1%}"


def pause(trainer: Trainer) -> None:
    if trainer.args.process_index == 1:
        time.sleep(1)


def train_with(folder: str, options: dict[str, Any]) -> None:
    make(folder, None, Changes(pause, 3, "on_step_begin"), save_strategy="no", **options).train()


@pytest.mark.parametrize(
    ("ranks_of", "options", "compiles", "waits"),
    [(2, {}, False, True), (1, {"torch_compile_backend": "aot_eager"}, True, False)],
    ids=["a slow rank", "compiled"],
)
def test_what_is_within_steps_has_parts_of_its_own(
    ranks: Ranks, tmp_path: Path, ranks_of: int, options: dict[str, Any], compiles: bool, waits: bool
) -> None:
    ranks.run(train_with, str(tmp_path), options, nproc=ranks_of).check()
    found = seconds_in(json.loads((tmp_path / "status.json").read_text()))
    assert found["waiting"] >= 0.9 if waits else found["waiting"] == 0, "rank 1 came a second later"
    assert (found["compiling"] > 0) == compiles
    assert found["kept"] > 0
    logs = [line for line in read_metrics(tmp_path) if "seconds_step" in line]
    spent = sum(line["seconds_step"] + line["seconds_data"] for line in logs)
    assert found["kept"] + found["waiting"] + found["compiling"] == pytest.approx(spent)
