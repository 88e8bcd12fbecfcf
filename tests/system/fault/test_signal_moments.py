"""A signal at any moment from the first instruction to the last: the exit code is 75, 0 or the signal's own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import environment
from tests.support.recipes import write_recipe
from tests.support.run_folders import read_status

TERM, USR1, INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
STEPS = 3
MOMENTS = 25  # of each case, in `make prove`


def train(folder: Path, out: Path, nproc: int) -> list[str]:
    recipe = write_recipe(folder, max_steps=STEPS, save_steps=1, logging_steps=1)
    more = ["--nproc", str(nproc)] if nproc > 1 else []
    return [sys.executable, "-m", "stepmark", "train", str(recipe), "--output_dir", str(out), *more]


def check(out: Path, code: int, errors: str, number: signal.Signals) -> None:
    assert code in (0, 75, -number), errors
    status = read_status(out)["state"] if (out / "status.json").exists() else None
    assert status in {0: ("done",), 75: ("interrupted", None), -number: (None,)}[code], errors
    assert "Error" not in errors, errors  # a KeyboardInterrupt in the interpreter's own first 50 ms is printed by it
    assert code != 75 or "Traceback" not in errors, errors


@pytest.mark.prove
@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("number", [TERM, USR1, INT])
@pytest.mark.parametrize("again", [False, True])
def test_a_signal_at_any_moment(
    tmp_path: Path, number: signal.Signals, nproc: int, again: bool, record_property: pytest.RecordProperty
) -> None:
    """Moments are spread over the duration of an undisturbed run. `again`: SIGTERM follows, as launchers send it."""
    began = time.monotonic()
    subprocess.run(train(tmp_path, tmp_path / "whole", nproc), env=environment(tmp_path), check=True)
    whole = time.monotonic() - began
    for moment in range(MOMENTS):
        out = tmp_path / f"out-{moment}"
        process = subprocess.Popen(
            train(tmp_path, out, nproc), env=environment(tmp_path), stderr=subprocess.PIPE, text=True
        )
        time.sleep(whole * (moment + 0.5) / MOMENTS)
        process.send_signal(number)
        if again:
            time.sleep(0.1)
            process.send_signal(TERM)
        errors = process.communicate(timeout=180)[1]
        codes = number if process.returncode != -TERM else TERM
        check(out, process.returncode, errors, codes)
    record_property("moments", MOMENTS)


# The moments at which signals once had another effect, each by name


SIGNALLED = """
import atexit, os, signal, sys
from stepmark.__main__ import main

class Signals:
    def __del__(self):  # like a callback of the import system: an exception is lost here
        for number in NUMBERS:
            os.kill(os.getpid(), number)
        for _ in range(1000):
            pass

def signal_at_import(name):
    class Finder:
        def find_spec(self, module, path=None, target=None):
            if module == name:
                sys.meta_path.remove(finder)
                Signals()
            return None
    finder = Finder()
    sys.meta_path.insert(0, finder)

def signal_in_step():
    from stepmark.training.step import TrainStep
    step = TrainStep.__call__
    def stopping(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return step(*arguments)
    TrainStep.__call__ = stopping

def signal_at_exit():
    def send(kill=os.kill, process=os.getpid(), numbers=NUMBERS):
        for number in numbers:
            kill(process, number)
    from stepmark.cli import train
    run = train.run
    def run_and_send(parsed):  # nobody listens any more
        try:
            return run(parsed)
        finally:
            send()
    train.run = run_and_send
    class AtTheEnd:  # lives as long as its module, which the interpreter clears after its own signal handlers
        def __del__(self):
            send()
    sys.modules["__main__"].kept = AtTheEnd()
    atexit.register(send)

NUMBERS = [int(number) for number in sys.argv[1].split(",")]
place, arguments = sys.argv[2], sys.argv[3:]
if place == "training and the end":
    signal_in_step()
signal_at_exit() if place.endswith("the end") else signal_at_import(place)
main(arguments)
"""


def run_signalled(folder: Path, place: str, numbers: list[int], *arguments: str) -> tuple[int, str]:
    """`stepmark` with signals to itself in the middle of importing a module, or while the interpreter ends."""
    command = [sys.executable, "-c", SIGNALLED, ",".join(map(str, numbers)), place, *arguments]
    done = subprocess.run(command, env=environment(folder), capture_output=True, text=True, timeout=180)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("place", "number"),
    [
        ("stepmark.recipe.train", TERM),
        pytest.param("stepmark.runtime.context", INT, marks=pytest.mark.prove),
        pytest.param("stepmark.trainer.trainer", INT, marks=pytest.mark.prove),
        pytest.param("transformers.models.auto.configuration_auto", USR1, marks=pytest.mark.prove),
        pytest.param("torch.optim", INT, marks=pytest.mark.prove),
    ],
)
def test_a_signal_during_imports(tmp_path: Path, place: str, number: signal.Signals) -> None:
    out = tmp_path / "out"
    code, errors = run_signalled(tmp_path, place, [number], *train(tmp_path, out, 1)[3:])
    assert code in (75, -number), errors
    check(out, code, errors, number)
    if place.startswith("stepmark"):
        *before, last = errors.splitlines()
        assert last == f"interrupted by {number.name}: not training"
        assert before in ([], ["device: cpu, 1 rank"])


@pytest.mark.prove
def test_signals_while_the_interpreter_ends(tmp_path: Path) -> None:
    """Of a run that a signal has stopped."""
    arguments = train(tmp_path, tmp_path / "out", 1)[3:]
    code, errors = run_signalled(tmp_path, "training and the end", [TERM, USR1, INT], *arguments)
    assert code == 75, errors
    assert "checkpoint-1 is saved\nto continue, start it again with resume_from_checkpoint: true" in errors


@pytest.mark.prove
def test_signals_while_the_interpreter_ends_after_an_error(tmp_path: Path) -> None:
    code, errors = run_signalled(tmp_path, "the end", [TERM], "train", "--nope")
    assert code == 2, errors


@pytest.mark.prove
def test_signals_while_the_interpreter_ends_after_the_last_step(tmp_path: Path) -> None:
    arguments = train(tmp_path, tmp_path / "out", 1)[3:]
    code, errors = run_signalled(tmp_path, "the end", [USR1, TERM, INT], *arguments)
    assert code == 0, errors


SCRIPT = """
import atexit, os, signal, sys
from tests.support import programs

atexit.register(os.kill, os.getpid(), signal.SIGTERM)
signalled = {"signal_at": {"event": "on_step_end", "step": 1, "ranks": [0]}} if sys.argv[2] == "75" else {}
programs.train({"output_dir": sys.argv[1], "samples": 9, "per_device_train_batch_size": 2, "max_steps": 3,
                "save_strategy": "steps", "save_steps": 1, "signal_grace": 30, **signalled})
"""


@pytest.mark.prove
@pytest.mark.parametrize("code", ["75", "0"])
def test_a_signal_while_a_script_ends_that_uses_the_trainer(tmp_path: Path, code: str) -> None:
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "out"), code],
        env={**environment(tmp_path), "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == int(code), done.stderr


def test_a_watcher_ends_with_75_and_the_code_stands(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stepmark", "evaluate", str(tmp_path / "run"), "--watch", "--device", "cpu"]
    with subprocess.Popen(command, env=environment(tmp_path), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "to appear" in process.stderr.readline()
        for _ in range(3):
            process.send_signal(TERM)
            time.sleep(0.2)
        errors = process.communicate(timeout=180)[1]
    assert process.returncode == 75, errors
    (line,) = [line for line in errors.splitlines() if not line.startswith("waiting for")]
    assert line == "interrupted by SIGTERM: evaluation is incomplete; run the same command to continue"
