"""The benchmark that kills trainers beside each other, with Stepmark's: what it counts, and that each goes on."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
LATER = 12


@pytest.fixture
def survival(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import survival

    return survival


@pytest.fixture
def contestant(survival: ModuleType, request: pytest.FixtureRequest) -> Iterator[object]:
    started = survival.Contestant(request.param)
    try:
        assert started.usable, started.why_not()
        yield started
    finally:
        started.close()


@pytest.mark.parametrize("contestant", ["Stepmark", "Stepmark dcp"], indirect=True)
def test_killed_in_saves_and_stopped_by_a_signal_it_ends_with_the_same_weights(
    survival: ModuleType, contestant: object
) -> None:
    class Run(survival.Run):  # type: ignore[misc,name-defined]
        """Disturbed a dozen steps after its start, when there are checkpoints to go on from."""

        def until_step(self, number: int) -> int | None:
            code: int | None = super().until_step(number + LATER)
            return code

    in_save, between = survival.Moment(0, 0.0, True, 0.5, None), survival.Moment(0, 0.0, False, 0.0, None)
    made = {}
    for kind, planned in (("undisturbed", []), ("kill", [in_save, in_save, between]), ("sigterm", [between])):
        with survival.folder_for(kind, None) as base:
            usual = survival.Usual.of([made["undisturbed"]] if made else [])
            made[kind] = Run(contestant, base, 1, usual).go(planned, kind)
    whole = made.pop("undisturbed")
    assert (whole["ended"], whole["steps"], whole["starts"]) == (True, survival.STEPS, 1)
    assert 0 < whole["save"] < whole["seconds"]
    assert 0 < whole["step"] < whole["seconds"] / survival.STEPS
    assert made["kill"]["disturbed"] == ["all in a save", "all in a save", "all"]
    assert made["sigterm"]["disturbed"] == ["sigterm"]
    for run in made.values():
        assert run["went on"] == run["disturbed"]
        assert run["starts"] == len(run["disturbed"]) + 1
        assert run["steps"] < survival.STEPS + LATER * len(run["disturbed"]), "it begins anew each time"
        assert (run["ended"], run["weights"], run["errors"]) == (True, whole["weights"], [])


@pytest.mark.parametrize("name", ["Stepmark, memory", "Stepmark"])
def test_faults_cost_starts_and_steps_but_no_bits(survival: ModuleType, name: str) -> None:
    import faults

    options = argparse.Namespace(steps=30, every=10, pause=0.05, repeat=1, seed=24)  # not just after saves
    planned = faults.faults(options.steps, options.every, options.seed)
    assert [(fault.step, fault.victim) for fault in planned] == [(3, 1), (17, 0), (24, 0)]
    (pair,) = faults.compete(name, options)
    undisturbed, disturbed = pair
    assert (undisturbed.starts, undisturbed.processes, undisturbed.again) == ([], 0, 0)
    assert len(disturbed.starts) == len(planned)
    assert disturbed.processes == faults.RANKS * len(planned)
    assert 0 < sum(disturbed.starts) < disturbed.seconds
    most = 2 if name == "Stepmark, memory" else 1.5 * options.every  # after the fault, a step is begun at most
    assert disturbed.again <= most * len(planned)
    assert (pair.difference(), pair.same()) == (0, True)
    weights = [*undisturbed.weights[:-1], undisturbed.weights[-1] + 0.5]
    changed = faults.Pair(undisturbed, disturbed._replace(weights=weights))
    assert (round(changed.difference(), 3), changed.same()) == (0.5, False)
    assert "| 1 of 1 |" in faults.row(name, [pair])


def test_a_person_is_needed_where_an_incomplete_checkpoint_is_in_the_way(
    survival: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a training of a few lines that writes in place, and one that renames."""
    program = tmp_path / "training.py"
    program.write_text(TRAINING)
    monkeypatch.setattr(survival, "PROGRAM", program)
    counted = {}
    for name in ("in place", "renamed"):
        contestant = survival.Contestant(name)
        with survival.folder_for("kill", tmp_path) as base:
            moments = [survival.Moment(0, 0.0, True, 0.0, None)] * 2
            counted[name] = survival.Run(contestant, base, 1, survival.Usual(3)).go(moments, "kill")
        contestant.close()
    broken, whole = counted["in place"], counted["renamed"]
    assert (broken["ended"], broken["went on"], broken["starts"]) == (False, [], 1 + survival.ATTEMPTS)
    assert broken["disturbed"] == ["all in a save"]
    assert broken["errors"] == ["ValueError: not a number"] * survival.ATTEMPTS
    assert (whole["ended"], whole["starts"], whole["errors"]) == (True, 3, [])
    assert whole["went on"] == whole["disturbed"] == ["all in a save"] * 2
    assert (whole["weights"], whole["steps"]) == ("3", 5)


# Counts to three, and saves after each step. It is killed in the middle of a write, twice.
TRAINING = """
import json, os, pathlib, sys, time
print("ready", flush=True)
for line in sys.stdin:
    folder, notes, _, output = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
os.setsid()
for target in (1, 2):
    os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT), target)
base = pathlib.Path(folder)
base.mkdir(exist_ok=True)
saved = base / "checkpoint"
kills = base / "killed"  # in as many saves
def note(text):
    with open(notes, "a") as file:
        file.write(text + "\\n")
note(f"begin 0 {os.getpid()}")
if saved.exists() and not saved.read_text():
    raise ValueError("not a number")
done = int(saved.read_text()) if saved.exists() else 0
while done < 3:
    note("step")
    done += 1
    waits = not kills.exists() or kills.stat().st_size < 2
    if waits:
        with open(kills, "a") as one:
            one.write("x")
    with open(saved if sys.argv[1] == "in place" else base / "checkpoint.new", "w") as file:
        if waits:
            time.sleep(60)
        file.write(str(done))
    if sys.argv[1] != "in place":
        os.rename(file.name, saved)
note(f"end {done}")
"""
