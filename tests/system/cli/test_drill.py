"""What `stepmark drill` finds where promises are kept, where they are broken, and where it cannot begin."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepmark.cli.main import run
from stepmark.config.recipe import read_recipe
from stepmark.filesystem import files
from stepmark.launch.world import World
from stepmark.preflight.drill.drill import FAULTS, Drill
from stepmark.preflight.drill.drilled_run import DrilledRun
from tests.support.braked_run import LAUNCHERS, LONG
from tests.support.buckets import make_bucket, object_store
from tests.support.interference import install_brake
from tests.support.processes import environment, torchrun, wait_until
from tests.support.recipes import write_recipe

STEPS = 8  # of 0.4 seconds each


SLOW_SYNC = """
import os, time
fsync = os.fsync
os.fsync = lambda descriptor: (time.sleep(0.6), fsync(descriptor))[1]
"""


class DrillProcess:
    """A drill in a process of its own, whose runs are slow enough to be disturbed; `resumed` is of `install_brake`, and
    `more` is run as each Python process starts."""

    def __init__(
        self, folder: Path, *arguments: str, resumed: str = "", more: str = "", launcher: bool = False, **fields: Any
    ) -> None:
        recipe = write_recipe(folder, max_steps=1000, **fields)
        (folder / "brake").touch()
        kept = {name: value for name, value in environment(folder).items() if not name.startswith(LAUNCHERS)}
        site = install_brake(folder / "site", folder / "brake", resumed)
        with (folder / "site" / "sitecustomize.py").open("a") as file:
            file.write(more)
        own = {"PYTHONPATH": site, "STEPMARK_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
        words = ["-m", "stepmark", "drill", str(recipe), "--max_steps", str(STEPS), "--json", *arguments]
        command = torchrun(*words) if launcher else [sys.executable, *words, "--nproc", "2"]
        self.folder = folder
        with (folder / "stderr").open("w") as told:
            self.process = subprocess.Popen(
                command, env={**kept, **own}, text=True, stdout=subprocess.PIPE, stderr=told
            )

    def rows(self, code: int) -> dict[str, dict[str, Any]]:
        """What it has found, by name. It has to end with this code, and to leave nothing."""
        out, _ = self.process.communicate(timeout=10 * LONG)
        assert self.process.returncode == code, (self.folder / "stderr").read_text()
        assert self.folders() == []
        found = json.loads(out)
        assert found["will_fail"] == bool(code)
        return {each["name"]: each for each in found["findings"]}

    def folders(self) -> list[Path]:
        return sorted(self.folder.glob("out*"))

    def processes(self) -> list[str]:
        """Those that have this drill's folder in their command line."""
        lines = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
        return [line.decode() for line in lines if f"{self.folder}/out-drill".encode() in line]


def test_promises_that_are_kept(tmp_path: Path) -> None:
    rows = DrillProcess(tmp_path, "--only", "kill,memory,flip,bucket-away", memory_every=1).rows(0)
    assert {rows[name]["verdict"] for name in ("undisturbed", "kill", "memory", "flip")} == {"kept"}
    assert rows["bucket-away"]["verdict"] == "left out"
    assert rows["kill"]["next_step"] > rows["kill"]["noticed"] > 0
    assert 1 <= rows["kill"]["repeated"] <= 2  # the recipe's snapshots are tried apart
    assert rows["memory"]["repeated"] <= 1
    assert 1 <= rows["flip"]["repeated"] <= 3
    assert rows["step_timeout"]["value"] == "auto"
    assert rows["memory_every"]["value"] >= 1


LONGEST = pytest.param("stop", marks=pytest.mark.prove)  # which waits for `step_timeout`


@pytest.mark.parametrize("name", [LONGEST, *sorted(FAULTS.keys() - {"kill", "flip", "bucket-away", "stop"})])
def test_every_fault(tmp_path: Path, name: str) -> None:
    row = DrillProcess(tmp_path, "--only", name).rows(0)[name]
    assert row["verdict"] == "kept"
    assert row["repeated"] == 0 or name in ("kill-in-save", "memory", "stop", "full-disk")


@pytest.mark.prove
def test_a_slow_folder(tmp_path: Path) -> None:
    rows = DrillProcess(tmp_path, "--only", "save,sigterm", more=SLOW_SYNC).rows(0)
    assert rows["fsync"]["status"] == "warning"
    assert {rows[name]["verdict"] for name in ("save", "sigterm")} == {"kept"}
    assert rows["save_timeout"]["value"] >= 70  # a save syncs each of its files
    assert rows["save_steps"]["value"] > STEPS


def test_a_bucket_that_is_away(tmp_path: Path) -> None:
    with object_store() as proxy:
        drill = DrillProcess(tmp_path, "--only", "bucket-away", mirror_to=f"{make_bucket(proxy)}/run")
        assert drill.rows(0)["bucket-away"]["verdict"] == "kept"


def test_ranks_of_a_launcher(tmp_path: Path) -> None:
    rows = DrillProcess(tmp_path, "--only", "kill,sigterm,fewer", launcher=True).rows(0)
    assert [rows[name]["verdict"] for name in ("kill", "sigterm", "fewer")] == ["kept", "kept", "left out"]


@pytest.mark.parametrize(
    ("resumed", "words"), [("forgets", "it went on from step 0, not from "), ("drifts", " of step ")]
)
def test_a_promise_that_is_broken(tmp_path: Path, resumed: str, words: str) -> None:
    rows = DrillProcess(tmp_path, "--only", "kill", resumed=resumed).rows(1)
    assert rows["undisturbed"]["verdict"] == "kept"
    assert rows["kill"]["status"] == "failure"
    assert words in rows["kill"]["text"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_a_drill_that_ends_leaves_no_processes(tmp_path: Path, number: signal.Signals) -> None:
    drill = DrillProcess(tmp_path, "--only", "kill")
    wait_until(lambda: any(tmp_path.glob("out-drill-*/undisturbed/metrics.jsonl")), LONG)
    (folder,) = drill.folders()
    drill.process.send_signal(number)
    drill.process.communicate(timeout=LONG)
    wait_until(lambda: not drill.processes(), LONG)
    assert drill.process.returncode == (1 if number == signal.SIGINT else -number)
    assert str(folder) in (tmp_path / "stderr").read_text()
    assert drill.folders() == ([] if number == signal.SIGINT else [folder])


def not_supported(source: Path, target: Path) -> None:
    raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), str(source))


def copies(source: Path, target: Path) -> None:
    (shutil.copytree if source.is_dir() else shutil.copy)(source, target)


@pytest.mark.parametrize(("rename", "culprit"), [(not_supported, "write"), (copies, "rename")])
def test_a_folder_without_renames_is_the_culprit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rename: Any, culprit: str
) -> None:
    monkeypatch.setattr(files, "rename", rename)
    assert run(["drill", str(write_recipe(tmp_path)), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [each["name"] for each in found if each["status"] == "failure"] == [culprit]
    assert {each["text"] for each in found if each["topic"] == "drill"} == {f"left out: see {culprit}"}
    assert list(tmp_path.glob("out*")) == []


@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_a_place_that_cannot_be_used_is_the_culprit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    bucket = {"mirror_to": "s3://no-such-bucket/run"} if place == "bucket" else {}
    folder = {} if place == "bucket" else {"output_dir": "/proc/nowhere"}
    with object_store():
        assert run(["drill", str(write_recipe(tmp_path, **bucket, **folder)), "--only", "kill", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    (culprit,) = (each["name"] for each in found if each["status"] == "failure")
    assert culprit.startswith("s3://no-such-bucket/run-") if place == "bucket" else culprit == "write"
    assert [each["text"] for each in found if each["topic"] == "drill"] == [f"left out: see {culprit}"]
    assert list(tmp_path.glob("out*")) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "kill,fire"], "--only: 'fire' is no fault; choose among save, kill, "),
        (["--nproc", "0"], "--nproc: must be at least 1"),
        (["--nproc", "2"], "--nproc: this process is already one of several ranks"),
        (["--tensor_parallel_size", "2"], "tensor_parallel_size: 2 does not divide "),
        (["--train_file", "gone.txt"], "train_file: "),
        (["--learning_rat", "1"], "learning_rat: is not a field"),
    ],
)
def test_a_wrong_call_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    launched = "--nproc" in arguments and arguments[1] != "0"
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}.items() if launched else ():
        monkeypatch.setenv(name, value)
    assert run(["drill", str(write_recipe(tmp_path)), *arguments]) == 2
    assert f"error: {words}" in capsys.readouterr().err
    assert list(tmp_path.glob("out*")) == []


def drill_of(folder: Path, ranks: int = 2, world: World | None = None, **fields: Any) -> Drill:
    recipe = read_recipe(str(write_recipe(folder, **fields)), {})
    return Drill(recipe, ["train"], None, None, world or World(), ranks)


def test_runs_differ_from_the_recipe_by_fields_that_are_valid(tmp_path: Path) -> None:
    """And that leave alone what others watch."""
    outside = {"prometheus_file": str(tmp_path / "run.prom"), "report_to": "tensorboard", "save_total_limit": 1}
    outside["memory_every"] = 5
    best = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    drill = drill_of(tmp_path, **outside, **best)
    args = read_recipe(str(tmp_path / "recipe.yaml"), drill.overrides(6, step_timeout="40")).training
    assert (args.prometheus_file, args.reporters, args.save_total_limit, args.memory_every) == (None, [], None, None)
    assert (args.eval_steps, args.save_steps, args.step_timeout) == (6, 6, 40.0)
    assert Path(args.output_dir).parent == tmp_path
    assert Path(args.output_dir) != tmp_path / "out"


def test_what_a_slow_folder_recommends(tmp_path: Path) -> None:
    drill = drill_of(tmp_path)
    assert list(drill._recommended()) == []
    drill.measured = {
        "run": 60.0,
        "step": 2.0,
        "start": 20.0,
        "stop": 70.0,
        "stall_seconds": 1.0,
        "durable_seconds": 65.0,
        "snapshot": 0.5,
    }
    values = {each.name: each.values["value"] for each in drill._recommended()}
    assert values == {
        "step_timeout": "auto",
        "join_timeout": 180,
        "signal_grace": 220,
        "save_timeout": 710,
        "save_steps": 98,  # three times as long as a save takes
        "memory_every": 25,
    }


@pytest.mark.parametrize(
    ("name", "ranks", "world", "fields", "words"),
    [
        ("stop", 1, World(), {}, "--nproc 2"),
        ("fewer", 1, World(), {}, "cannot have fewer"),
        ("more", 2, World(size=2), {}, "a launcher's ranks"),
        ("fewer", 4, World(), {"tensor_parallel_size": 2, "zero_1": True}, ""),
        ("more", 2, World(), {"tensor_parallel_size": 2}, "cannot have fewer"),
        ("fewer", 2, World(), {"task": "sft"}, "set it"),
        ("kill", 1, World(), {}, ""),
    ],
)
def test_what_is_left_out_says_why(
    tmp_path: Path, name: str, ranks: int, world: World, fields: dict[str, Any], words: str
) -> None:
    reason = drill_of(tmp_path, ranks, world, **fields)._lacking(name)
    assert words in reason
    assert bool(reason) == bool(words)


def ended_run(folder: Path, losses: list[float], weights: bytes = b"model", resumed: int | None = None) -> DrilledRun:
    folder.mkdir()
    lines: list[dict[str, float]] = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    if resumed is not None:
        lines.insert(resumed, {"resumed": resumed})
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps({**line, 'time': 1.0})}\n" for line in lines))
    (folder / "model.safetensors").write_bytes(weights)
    return DrilledRun(folder, [], 1.0, World(), None)


@pytest.mark.parametrize(
    ("fields", "restarts", "words"),
    [
        ({}, 0, ""),
        ({"resumed": 2}, 1, ""),
        ({"losses": [3.0, 2.0, 1.0000000000000002]}, 0, "gradient norm of step 3 "),
        ({"losses": [3.0, 2.0]}, 0, "gradient norm of step 3 "),
        ({"weights": b"other"}, 0, "the final weights"),
        ({"resumed": 1}, 1, "it went on from step 1, not from step 2"),
        ({}, 1, "it went on from step 0, not from step 2"),
        ({"resumed": 3}, 1, "it went on from step 3, not from step 2"),  # which was damaged
    ],
)
def test_what_differs_is_named(tmp_path: Path, fields: dict[str, Any], restarts: int, words: str) -> None:
    drill = drill_of(tmp_path)
    drill.result = ended_run(tmp_path / "undisturbed", [3.0, 2.0, 1.0]).result()
    told = drill._difference(ended_run(tmp_path / "run", **{"losses": [3.0, 2.0, 1.0], **fields}), 2, restarts)
    assert words in told
    assert bool(told) == bool(words)
