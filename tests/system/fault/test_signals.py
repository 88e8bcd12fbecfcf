"""A signal stops all ranks after the same step, with a checkpoint where there is time, and the run can be resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.save import write as saving
from stepmark.trainer.interruption import preemption
from tests.support import programs
from tests.support.processes import environment, processor_seconds, torchrun, wait_until
from tests.support.ranks import Ranks
from tests.support.recipes import write_recipe
from tests.support.run_folders import read_status, saved_steps

PROGRAM, EACH = "tests.support.programs:train", "tests.support.programs:train_each"
TERM, USR1, HUP = int(signal.SIGTERM), int(signal.SIGUSR1), int(signal.SIGHUP)
UNDISTURBED: dict[tuple[str, int], Any] = {}


def options(folder: Path, device: str, nproc: int) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "device": device,
        "per_device_train_batch_size": 4 // nproc,
        "samples": 25,
        "max_steps": 12,
        "logging_steps": 2,
        "save_strategy": "steps",
        "save_steps": 4,
        "eval_strategy": "epoch",
        "signal_grace": 60,
        "resume_from_checkpoint": True,
    }


def undisturbed(ranks: Ranks, folder: Path, device: str, nproc: int) -> Any:
    if (device, nproc) not in UNDISTURBED:
        UNDISTURBED[device, nproc] = ranks.run(PROGRAM, options(folder / "whole", device, nproc), nproc=nproc).check()
    return UNDISTURBED[device, nproc]


def case(device: str, nproc: int, *marks: Any, prove: bool = False, **signalled: Any) -> Any:
    marks = (*marks, *([pytest.mark.xla] if device == "xla" else []), *([pytest.mark.prove] if prove else []))
    names = "+".join(signal.Signals(number).name for number in signalled.get("numbers", [TERM]))
    ranks = " and ".join(str(rank) for rank in signalled["ranks"])
    when = f"{signalled['event']} of step {signalled['step']}"
    return pytest.param(device, nproc, signalled, marks=marks, id=f"{device}-{nproc}-{names} to rank {ranks}, {when}")


@pytest.mark.parametrize(
    ("device", "nproc", "signalled"),
    [
        case("cpu", 1, event="on_step_begin", step=5, ranks=[0], prove=True),
        case("cpu", 2, event="on_step_begin", step=5, ranks=[0], numbers=[USR1]),
        case("cpu", 2, event="on_step_end", step=6, ranks=[1], prove=True),
        case("cpu", 1, event="on_step_end", step=6, ranks=[0], numbers=[HUP]),
        case("cpu", 2, event="on_step_end", step=7, ranks=[1], prove=True),  # the epoch's last step
        case("cpu", 2, event="on_pre_optimizer_step", step=5, ranks=[0, 1], numbers=[TERM, TERM, USR1]),
        case("cpu", 2, event="on_save", step=4, ranks=[0], prove=True),
        case("cpu", 2, event="on_save", step=4, ranks=[1], numbers=[TERM, TERM]),
        case("xla", 1, event="on_step_end", step=5, ranks=[0], prove=True),
        case("xla", 2, event="on_step_begin", step=5, ranks=[1], prove=True),
        case("xla", 2, event="on_save", step=4, ranks=[0], prove=True),
        case("xla", 2, event="on_pre_optimizer_step", step=6, ranks=[0, 1], prove=True),
    ],
)
def test_a_signal_saves_and_the_resumed_run_is_the_undisturbed_one(
    ranks: Ranks, tmp_path: Path, device: str, nproc: int, signalled: dict[str, Any]
) -> None:
    folder = tmp_path / "signalled"
    stopped = ranks.run(PROGRAM, {**options(folder, device, nproc), "signal_at": signalled}, nproc=nproc)
    assert stopped.codes == [75] * nproc, stopped.logs
    told = read_status(folder)
    name = signal.Signals(signalled.get("numbers", [TERM])[0]).name
    assert (told["state"], told["reason"].split(":")[0]) == ("interrupted", name), told
    assert signalled["step"] <= told["step"] <= signalled["step"] + 2
    assert saved_steps(folder)[-1] == told["step"]
    resumed = ranks.run(PROGRAM, options(folder, device, nproc), nproc=nproc).check()
    whole = undisturbed(ranks, tmp_path, device, nproc)
    assert resumed[0]["resumed"] == [told["step"]]
    assert resumed[0]["losses"] == whole[0]["losses"]
    assert resumed[0]["evaluations"] == whole[0]["evaluations"]
    assert [each["weights"] for each in resumed] == [each["weights"] for each in whole]
    assert read_status(folder)["state"] == "done"


def evaluating(folder: Path, device: str, strategy: str) -> dict[str, Any]:
    """Two sets of five batches each, evaluated every third step or epoch; the metric decides on what is saved."""
    return {
        **options(folder, device, 2),
        "max_steps": 9,
        "eval_strategy": strategy,
        "eval_steps": 3,
        "save_strategy": "best",
        "metric_for_best_model": "eval_b_loss",
        "load_best_model_at_end": True,
        "per_device_eval_batch_size": 2,
        "eval_samples": 17,
        "eval_sets": ["a", "b"],
    }


def evaluations(folder: Path) -> list[list[Any]]:
    """Of the history, with what was saved for them."""
    state = json.loads((folder / "trainer_state.json").read_text())
    history = [
        [log["step"], key, value] for log in state["log_history"] for key, value in log.items() if key.endswith("_loss")
    ]
    return [*history, [state["best_global_step"], state["best_metric"], saved_steps(folder)]]


@pytest.mark.parametrize(
    ("device", "strategy", "event", "step"),
    [
        pytest.param("cpu", "steps", "on_prediction_step", 6, id="in a set"),
        pytest.param("cpu", "steps", "on_evaluate", 6, id="between sets", marks=pytest.mark.prove),
        pytest.param("cpu", "epoch", "on_evaluate", 7, id="at an epoch's end"),
        pytest.param("cpu", "steps", "on_prediction_step", 9, id="at the end", marks=pytest.mark.prove),
        pytest.param("xla", "steps", "on_evaluate", 6, id="xla", marks=[pytest.mark.xla, pytest.mark.prove]),
    ],
)
def test_a_signal_in_an_evaluation_stops_it_and_the_resumed_run_takes_it_up(
    ranks: Ranks, tmp_path: Path, device: str, strategy: str, event: str, step: int
) -> None:
    settings = evaluating(tmp_path / "signalled", device, strategy)
    signalled = {"event": event, "step": step, "ranks": [0, 1], "block": 1.0}  # in which all hear of it
    stopped = ranks.run(PROGRAM, {**settings, "signal_at": signalled}, nproc=2)
    assert stopped.codes == [75, 75], stopped.logs
    told = read_status(tmp_path / "signalled")
    assert told["step"] == step
    assert f"stopped in the evaluation after step {step}" in told["reason"]
    assert step in saved_steps(tmp_path / "signalled")
    both = ranks.run(EACH, settings, evaluating(tmp_path / "whole", device, strategy), nproc=2).check()
    resumed, whole = zip(*both, strict=True)
    assert resumed[0]["losses"] == whole[0]["losses"]
    assert [each["weights"] for each in resumed] == [each["weights"] for each in whole]
    found, wanted = evaluations(tmp_path / "signalled"), evaluations(tmp_path / "whole")
    assert found[:-1] == wanted[:-1]
    assert found[-1][:2] == wanted[-1][:2]
    assert set(found[-1][2]) == {*wanted[-1][2], step}


def train_with_slow_saves(seconds: float, settings: dict[str, Any]) -> Any:
    write = saving.write_extents

    def slow(*arguments: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return write(*arguments, **named)

    saving.write_extents = slow
    return programs.train(settings)


def test_a_save_that_cannot_fit_is_not_begun(ranks: Ranks, tmp_path: Path) -> None:
    """A save takes longer than the grace, as the first one has shown."""
    settings = {**options(tmp_path, "cpu", 2), "signal_grace": 3, "async_save": False}
    settings["signal_at"] = {"event": "on_step_begin", "step": 5, "ranks": [1]}
    stopped = ranks.run(train_with_slow_saves, 4.0, settings, nproc=2)
    assert stopped.codes == [75, 75], stopped.logs
    assert saved_steps(tmp_path) == [4]
    assert read_status(tmp_path)["state"] == "interrupted"
    assert "no time for a save; the last checkpoint stands" in stopped.logs[0]


def test_a_save_that_is_on_its_way_may_end(ranks: Ranks, tmp_path: Path) -> None:
    settings = {**options(tmp_path, "cpu", 2), "signal_at": {"event": "on_save", "step": 4, "ranks": [0]}}
    stopped = ranks.run(train_with_slow_saves, 1.5, settings, nproc=2)
    assert stopped.codes == [75, 75], stopped.logs
    assert 4 in saved_steps(tmp_path)


def train_on_a_busy_machine(settings: dict[str, Any]) -> Any:
    """Where ten usual steps may take longer than the grace, by which a step that hangs is known."""
    preemption.STUCK = 0
    return programs.train(settings)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_outlasts_the_grace_leaves_the_last_checkpoint(ranks: Ranks, tmp_path: Path, rank: int) -> None:
    """One rank is where no signal handler of Python's can run, and the other waits for it in a collective."""
    # In the grace the other rank hears where this one is, also on a busy machine.
    settings = {**options(tmp_path, "cpu", 2), "signal_grace": 5, "async_save": False}
    settings["signal_at"] = {"event": "on_pre_optimizer_step", "step": 5, "ranks": [rank], "block": 600}
    stopped = ranks.run(train_on_a_busy_machine, settings, nproc=2)
    assert stopped.codes == [75, 75], stopped.logs
    assert saved_steps(tmp_path) == [4]
    status = read_status(tmp_path)
    assert status["state"] == "interrupted"
    assert "the last checkpoint stands" in stopped.logs[0]
    assert f"rank {rank} in send (programs.py, line " in status["reason"], "a run that hangs is not without time alone"
    assert f"rank {1 - rank} in " in status["reason"]
    assert all("the stacks of all threads" in log for log in stopped.logs)


@pytest.mark.xla
@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.prove)])
def test_a_signal_during_the_first_compilation(ranks: Ranks, tmp_path: Path, nproc: int) -> None:
    settings = {**options(tmp_path / "run", "xla", nproc), "async_save": False}  # the kill finds it saved
    assert -9 in ranks.run(PROGRAM, {**settings, "kill_at": 5}, nproc=nproc).codes
    signalled = {"event": "on_pre_optimizer_step", "step": 4, "ranks": [0]}
    stopped = ranks.run(PROGRAM, {**settings, "signal_grace": 0.05, "signal_at": signalled}, nproc=nproc)
    assert stopped.codes == [75] * nproc
    assert saved_steps(tmp_path / "run") == [4]
    assert read_status(tmp_path / "run")["state"] == "interrupted"
    resumed = ranks.run(PROGRAM, settings, nproc=nproc).check()
    assert resumed[0]["losses"] == undisturbed(ranks, tmp_path, "xla", nproc)[0]["losses"]


def test_without_save_on_signal_a_signal_is_a_signal(ranks: Ranks, tmp_path: Path) -> None:
    settings = {**options(tmp_path, "cpu", 1), "save_on_signal": False, "async_save": False}
    settings["signal_at"] = {"event": "on_step_begin", "step": 5, "ranks": [0]}
    assert ranks.run(PROGRAM, settings).codes == [-TERM]
    assert saved_steps(tmp_path) == [4]


@pytest.mark.parametrize(
    ("launcher", "workers", "number"),
    [
        ("one", 1, signal.SIGINT),
        pytest.param("one", 1, signal.SIGTERM, marks=pytest.mark.prove),
        pytest.param("nproc", 1, signal.SIGINT, marks=pytest.mark.prove),
        pytest.param("nproc", 1, signal.SIGTERM, marks=pytest.mark.prove),
        pytest.param("torchrun", 0, signal.SIGTERM, marks=pytest.mark.prove),
    ],
)
def test_a_signal_to_a_whole_job(tmp_path: Path, launcher: str, workers: int, number: signal.Signals) -> None:
    """One rank gets it with its workers, as Slurm and shells send it; of two, the launcher passes it on. SIGINT is a
    terminal's Ctrl-C. torchrun has an exit code of its own; the word is in status.json."""
    fields = {"max_steps": 100_000, "save_steps": 100_000, "logging_steps": 5, "signal_grace": 30}
    fields |= {"dataloader_num_workers": workers, "resume_from_checkpoint": launcher == "nproc"}
    train = ["-m", "stepmark", "train", str(write_recipe(tmp_path, **fields))]
    command = {"one": [sys.executable, *train], "nproc": [sys.executable, *train, "--nproc", "2"]}
    job = command.get(launcher) or torchrun(*train)
    given: dict[str, Any] = {"env": environment(tmp_path), "start_new_session": True, "stderr": subprocess.PIPE}
    metrics = tmp_path / "out" / "metrics.jsonl"
    with subprocess.Popen(job, cwd=tmp_path, text=True, **given) as run:
        works = partial(processor_seconds, STEPMARK_CACHE=given["env"]["STEPMARK_CACHE"])
        wait_until(
            lambda: run.poll() is not None or (metrics.exists() and metrics.read_text().count("\n") > 2), 120, works
        )
        os.killpg(run.pid, number) if launcher == "one" else run.send_signal(number)
        told = run.communicate(timeout=120)[1]
    status = read_status(tmp_path / "out")
    assert status["state"] == "interrupted", told
    assert saved_steps(tmp_path / "out") == [status["step"]], told
    if launcher == "torchrun":
        assert run.returncode != 0
        return
    assert run.returncode == 75, told
    assert "error" not in told
    assert "Traceback" not in told
    assert ("press Ctrl-C again to end at once" in told) == (number == signal.SIGINT)
    remedy = "the same command again" if launcher == "nproc" else "it again with resume_from_checkpoint: true"
    assert f"to continue, start {remedy}" in told


# Before training


def train_slowly(settings: dict[str, Any]) -> Any:
    """The command line's own way into training; a signal finds it before it has begun."""
    from stepmark.trainer.interruption.run_end import ending_outside_training

    with ending_outside_training(Path(settings["output_dir"])):
        if settings.pop("signalled"):
            os.kill(os.getpid(), TERM)
            time.sleep(60)
        return programs.train(settings)


@pytest.mark.parametrize("state", [None, "running", "failed"])
def test_a_signal_before_training_is_recorded_in_the_status(ranks: Ranks, tmp_path: Path, state: str | None) -> None:
    folder = tmp_path / "run"
    if state is not None:
        folder.mkdir()
        (folder / "status.json").write_text(json.dumps({"state": state, "step": 4, "time": 1.0, "reason": "before"}))
    stopped = ranks.run(train_slowly, {"output_dir": str(folder), "signalled": True})
    assert stopped.codes == [75], stopped.logs
    told = read_status(folder)
    assert (told["state"], told["step"]) == ("interrupted", 0 if state is None else 4)
    assert told["reason"] == "SIGTERM: not training"


def test_a_signal_to_a_second_start_leaves_the_status_of_the_live_run(ranks: Ranks, tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as live:
        live.claim()
        (tmp_path / "status.json").write_text(json.dumps({"state": "running", "step": 4, "time": 1.0, "reason": None}))
        stopped = ranks.run(train_slowly, {"output_dir": str(tmp_path), "signalled": True})
    assert stopped.codes == [75], stopped.logs
    assert read_status(tmp_path)["state"] == "running"


RANK = "import os, time; os.write(1, b'up\\n'); time.sleep(60)"  # in one write, so that two ranks' lines stay apart
SUPERVISE = (
    "import sys; from stepmark.launch.supervisor import supervise; "
    "sys.exit(supervise([sys.executable, '-c', sys.argv[1]], 2, resumable=sys.argv[2] == 'True'))"
)


@pytest.mark.parametrize(("resumable", "code"), [(True, 75), (False, 1)])
def test_a_signal_before_the_ranks_can_hear_it(resumable: bool, code: int) -> None:
    """They are ended by it; the run can be started again all the same, where `save_on_signal` is set."""
    command = [sys.executable, "-c", SUPERVISE, RANK, str(resumable)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline() == "up\n"
        process.send_signal(TERM)
        told = process.communicate(timeout=60)[1]
    assert process.returncode == code, told
    assert ("was killed by SIGTERM" in told) == (not resumable)


PIPELINE = {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 2, "layers": 2}


@pytest.mark.parametrize(
    ("event", "step", "rank"),
    [
        pytest.param("on_prediction_step", 6, 1, id="its last stage is behind in an evaluation"),
        pytest.param("on_step_begin", 5, 0, id="first stage", marks=pytest.mark.prove),
        pytest.param("on_substep_end", 5, 1, id="last stage, between micro-batches", marks=pytest.mark.prove),
    ],
)
def test_a_signal_stops_a_pipeline(ranks: Ranks, tmp_path: Path, event: str, step: int, rank: int) -> None:
    """Its stages stop in the same place, though the first one is ahead, and what it has sent still arrives."""
    more = {**PIPELINE, "eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 1, "eval_samples": 9}
    settings = {**options(tmp_path / "signalled", "cpu", 2), **more}
    signalled = {"event": event, "step": step, "ranks": [rank], "block": 0.3}
    stopped = ranks.run(PROGRAM, {**settings, "signal_at": signalled}, nproc=2, timeout=60)
    assert stopped.codes == [75, 75], stopped.logs
    told = read_status(tmp_path / "signalled")
    assert saved_steps(tmp_path / "signalled")[-1] == told["step"]
    assert (told["step"] == step) or event != "on_prediction_step"
    both = ranks.run(EACH, settings, {**settings, "output_dir": str(tmp_path / "whole")}, nproc=2).check()
    resumed, whole = zip(*both, strict=True)
    assert resumed[0]["losses"] == whole[0]["losses"]
    assert resumed[0]["evaluations"] == whole[0]["evaluations"]
    assert [each["weights"] for each in resumed] == [each["weights"] for each in whole]
