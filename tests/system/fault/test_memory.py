"""`memory_every`: ranks that are killed go on from a snapshot in shared memory, which a run has for itself alone."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepmark.checkpoint.coordination.folder_claim import FolderClaim
from stepmark.checkpoint.coordination.shared_memory import SHARED_MEMORY, free_memory, make_memory, memory_of
from stepmark.checkpoint.format.checkpoint_folders import COORDINATION, checkpoints, step_of
from stepmark.checkpoint.format.manifest import read_manifest
from stepmark.errors import StepmarkError
from stepmark.filesystem.json_files import read_lines, read_object
from stepmark.filesystem.json_values import decode_plain
from stepmark.trainer.run_folder import memory_snapshots
from stepmark.trainer.run_folder.run_log import EVENTS, read_metrics
from tests.support import commands
from tests.support.commands import ForkedRank, train_disturbed
from tests.support.corruption import flip_bit
from tests.support.interference import install
from tests.support.programs import logged
from tests.support.ranks import Ranks
from tests.support.recipes import write_recipe
from tests.support.run_folders import read_losses, read_status
from tests.system.fault import test_resume

PROGRAM = "tests.support.programs:train"
LONGEST = 0.1  # seconds, about a step
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    **test_resume.MESHES,
    "pp": (2, {"pipeline_parallel_size": 2, "layers": 2, "gradient_accumulation_steps": 2}),
    "zero_1 of 3": (3, {"zero_1": True}),
    "dp and tp": (4, {"tensor_parallel_size": 2}),
    "fsdp of 4": (4, {"fsdp": True}),
}


@pytest.fixture(autouse=True)
def no_leftovers(tmp_path: Path) -> Iterator[None]:
    yield
    for path in SHARED_MEMORY.glob("stepmark-*"):
        if str(read_object(path / "owner.json").get("folder")).startswith(str(tmp_path)):
            shutil.rmtree(path)


def options(folder: Path, mesh: str = "one", **more: Any) -> dict[str, Any]:
    """Dropout on, a snapshot of each step, and a checkpoint every now and then, in the background."""
    return {
        "output_dir": str(folder),
        "device": "cpu",
        "max_steps": 10,
        "samples": 53,
        "save_strategy": "steps",
        "save_steps": 50,
        "memory_every": 1,
        "eval_strategy": "steps",
        "eval_steps": 20,
        "resume_from_checkpoint": True,
        **MESHES[mesh][1],
        **more,
    }


def resumed_from(folder: Path) -> list[tuple[int, str]]:
    """Where the run went on: the step, and the checkpoint."""
    return [
        (event["step"], event["checkpoint"]) for event in read_lines(folder / EVENTS) if event["event"] == "resumed"
    ]


def repeated(folder: Path) -> list[int]:
    """How many completed steps were done again after each fault."""
    found, last = [], 0
    for line in read_metrics(folder):
        if "resumed" in line:
            found.append(last - line["resumed"])
        last = line["step"] if "loss" in line else line.get("resumed", last)
    return found


@pytest.mark.parametrize(
    ("mesh", "wanted", "steps"),
    [
        pytest.param("dp", 3, 24),
        *(
            pytest.param(mesh, wanted, 6 * wanted, marks=pytest.mark.prove)
            for mesh, wanted in {
                "dp": 30,
                "zero_1": 20,
                "fsdp": 10,
                "tp": 10,
                "zero_1 of 3": 10,
                "dp and tp": 10,
                "fsdp of 4": 10,
            }.items()
        ),
    ],
)
def test_killed_ranks_repeat_a_step(
    ranks: Ranks, tmp_path: Path, record_property: Callable[[str, object], None], mesh: str, wanted: int, steps: int
) -> None:
    nproc, folder = MESHES[mesh][0], tmp_path / "killed"
    settings = options(folder, mesh, max_steps=steps)
    whole = ranks.run(PROGRAM, {**settings, "output_dir": str(tmp_path / "whole")}, nproc=nproc).check()
    folder.mkdir()
    while len(kills(folder)) < wanted:
        before = len(kills(folder))
        outcome = ranks.run(supervise_and_kill, settings, nproc, before + 100 * steps)
        if len(kills(folder)) == before:  # it ended first
            assert outcome.results == [{"code": 0}], outcome.logs
            break
    again = ranks.run(PROGRAM, settings, nproc=nproc).check()
    found = json.loads(json.dumps(logged(folder)))
    assert (found["losses"], found["evaluations"]) == (whole[0]["losses"], whole[0]["evaluations"])
    assert [each["weights"] for each in again] == [each["weights"] for each in whole]
    assert read_status(folder)["state"] == "done"
    times = repeated(folder)
    assert times
    assert max(times) <= 1, times
    assert memory_of(folder) is None
    record_property("kills", len(kills(folder)))
    record_property("steps repeated", sum(times))


@pytest.mark.parametrize(
    ("sharding", "wanted"),
    [
        ("zero_1", 2),
        *(pytest.param(each, 33, marks=pytest.mark.prove) for each in ("data_parallel_size", "zero_1", "fsdp")),
    ],
)
def test_ranks_that_are_killed_stop_go_away_and_come_back_repeat_a_step(
    ranks: Ranks, tmp_path: Path, record_property: Callable[[str, object], None], sharding: str, wanted: int
) -> None:
    """Four logical ranks, in two to four processes, another number after each fault."""
    folder, steps, chance = tmp_path / "disturbed", 8 * wanted, random.Random(wanted)
    settings = options(folder, max_steps=steps, data_parallel_replicas=4, step_timeout=4.0, save_timeout=8.0)
    settings |= {} if sharding == "data_parallel_size" else {sharding: True}
    whole = ranks.run(PROGRAM, {**settings, "output_dir": str(tmp_path / "whole")}, nproc=4).check()
    folder.mkdir()
    processes, signals = 4, [signal.SIGSTOP, signal.SIGKILL]
    while len(kills(folder)) < wanted:
        before = len(kills(folder))
        outcome = ranks.run(supervise_and_kill, settings, processes, chance.random(), signals[before % 2])
        if len(kills(folder)) == before:  # it ended first
            assert outcome.results == [{"code": 0}], outcome.logs
            break
        assert outcome.results[0]["code"] != 0
        processes = chance.choice([each for each in (2, 3, 4) if each != processes])
    again = ranks.run(PROGRAM, settings, nproc=4).check()
    found = json.loads(json.dumps(logged(folder)))
    assert (found["losses"], found["evaluations"]) == (whole[0]["losses"], whole[0]["evaluations"])
    assert [each["weights"] for each in again] == [each["weights"] for each in whole]
    times = repeated(folder)
    assert len(times) >= len(kills(folder)) >= wanted / 2  # it may end first
    assert max(times) <= 1, times
    for each in signals:
        record_property(f"ranks with {each.name}", sum(each.name in line for line in kills(folder)))
    record_property("steps repeated", sum(times))


def killed(ranks: Ranks, folder: Path, step: int, mesh: str = "one", **more: Any) -> list[Path]:
    """A run that is killed at the end of a step, before its snapshot; returns the snapshots."""
    given = options(folder, mesh, async_save=False, kill_at=step, **more)
    assert -9 in ranks.run(PROGRAM, given, nproc=MESHES[mesh][0]).codes
    memory = memory_of(folder)
    found = [] if memory is None else checkpoints(memory)
    for path in found[1:]:  # which was about to be deleted
        shutil.rmtree(path)
    return found[:1]


def finished(ranks: Ranks, folder: Path, mesh: str = "one", **more: Any) -> Any:
    return ranks.run(PROGRAM, options(folder, mesh, async_save=False, **more), nproc=MESHES[mesh][0]).check()


def flip(folder: Path, snapshot: Path) -> None:
    flip_bit(snapshot / "model.safetensors", -40)


def tear(folder: Path, snapshot: Path) -> None:
    """As a kill in the middle of its deletion would, were it not renamed first."""
    (snapshot / "optimizer" / "optimizer.safetensors").unlink()


def empty(folder: Path, snapshot: Path) -> None:
    shutil.rmtree(folder)


def empty_visibly(folder: Path, snapshot: Path) -> None:
    """As `rm -r FOLDER/*` does."""
    for path in folder.glob("[!.]*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def drop_checkpoints(folder: Path, snapshot: Path) -> None:
    for path in checkpoints(folder):
        shutil.rmtree(path)


def move(folder: Path, snapshot: Path) -> None:
    """It was copied, and the run that is there is another one's copy."""
    shutil.copytree(folder, copy := folder.with_name("copy"))
    shutil.rmtree(folder)
    copy.rename(folder)
    owner = snapshot.parent / "owner.json"
    owner.write_text(owner.read_text().replace(str(folder), str(copy)))


MEMORY, CHECKPOINT, NOTHING = [(5, "memory")], [(3, "checkpoint-3")], []
WINS: dict[str, tuple[list[Any], dict[str, Any], dict[str, Any], Any]] = {
    "the snapshot": (MEMORY, {}, {}, None),
    "a later checkpoint": ([(5, "checkpoint-5")], {"save_steps": 5, "memory_every": 2}, {}, None),
    "the snapshot without checkpoints": (MEMORY, {"save_steps": 50}, {}, None),
    "a named checkpoint": (CHECKPOINT, {}, {"resume_from_checkpoint": "checkpoint-3"}, None),
    "an accepted change": (CHECKPOINT, {}, {"seed": 7, "accept_changes": "seed"}, None),
    "a run without snapshots": (CHECKPOINT, {}, {"memory_every": None}, None),
    "a flipped bit": (CHECKPOINT, {}, {}, flip),
    "a flipped bit without checkpoints": (NOTHING, {"save_steps": 50}, {}, flip),
    "a torn one": (CHECKPOINT, {}, {}, tear),
    "a folder that is gone": (NOTHING, {}, {}, empty),
    "a folder without what is seen": (NOTHING, {"save_steps": 50}, {}, empty_visibly),
    "a folder without checkpoints": (NOTHING, {}, {}, drop_checkpoints),
    "a copied folder": (CHECKPOINT, {}, {}, move),
}


@pytest.mark.parametrize("case", WINS)
def test_what_a_run_goes_on_from(ranks: Ranks, tmp_path: Path, case: str) -> None:
    """Killed in step 6, with a snapshot of step 5 and a checkpoint of step 3."""
    expected, before, after, change = WINS[case]
    folder = tmp_path / "run"
    (snapshot,) = killed(ranks, folder, 6, **{"save_steps": 3, **before})
    if change is not None:
        change(folder, snapshot)
    if str(after.get("resume_from_checkpoint", "")).startswith("checkpoint"):
        after = {**after, "resume_from_checkpoint": str(folder / after["resume_from_checkpoint"])}
    (found,) = finished(ranks, folder, save_steps=20, **after)
    assert resumed_from(folder) == expected
    assert memory_of(folder) is None, "a run that has ended leaves none"
    if "seed" not in after:
        (whole,) = finished(ranks, tmp_path / "whole", memory_every=None, save_steps=20)
        assert (found["losses"], found["weights"]) == (whole["losses"], whole["weights"])
    assert not [
        path for path in SHARED_MEMORY.glob("stepmark-*") if path == snapshot.parent and case != "a copied folder"
    ]


def test_a_history_that_was_left_is_not_gone_on_from(ranks: Ranks, tmp_path: Path) -> None:
    """A named checkpoint was resumed from, and the run was killed again before the next snapshot."""
    killed(ranks, tmp_path / "run", 6, save_steps=3)
    named = str(tmp_path / "run" / "checkpoint-3")
    assert killed(ranks, tmp_path / "run", 4, save_steps=3, resume_from_checkpoint=named) == []
    finished(ranks, tmp_path / "run", save_steps=3)
    assert resumed_from(tmp_path / "run") == [(3, "checkpoint-3"), (3, "checkpoint-3")]


def test_the_number_of_ranks_is_that_of_the_snapshot(ranks: Ranks, tmp_path: Path) -> None:
    """The checkpoint before it is of fewer: the run went on on more processes since."""
    folder = tmp_path / "run"
    killed(ranks, folder, 6, "dp", save_steps=3)
    more = options(folder, save_steps=20, kill_at=7, async_save=False)
    assert -9 in ranks.run(PROGRAM, more, nproc=4).codes
    finished(ranks, folder, "dp", save_steps=20)
    assert resumed_from(folder) == [(5, "memory"), (6, "memory")]
    assert decode_plain(read_manifest(folder / "checkpoint-10").metadata)["samples_per_step"] == 2 * 4


def test_the_best_checkpoint_is_found_in_the_folder_as_it_is_called_now(ranks: Ranks, tmp_path: Path) -> None:
    """Beside the snapshot there is none; and the path that it was saved by leads nowhere."""
    best = {"save_steps": 2, "eval_steps": 2, "load_best_model_at_end": True, "learning_rate": 0.05}
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "run").mkdir()
    killed(ranks, tmp_path / "link", 8, **best)
    (tmp_path / "link").unlink()
    (found,) = finished(ranks, tmp_path / "run", **best)
    assert resumed_from(tmp_path / "run") == [(7, "memory")]
    assert found["weights"] == finished(ranks, tmp_path / "whole", **best)[0]["weights"]
    assert Path(read_object(tmp_path / "run" / "trainer_state.json")["best_model_checkpoint"]).name == "checkpoint-2"


@pytest.mark.parametrize("mesh", ["dp", "zero_1", "fsdp"])
def test_fewer_processes_go_on_from_the_snapshot_of_more(ranks: Ranks, tmp_path: Path, mesh: str) -> None:
    killed(ranks, tmp_path / "run", 6, mesh)
    alone = options(tmp_path / "run", mesh, async_save=False)
    (found,) = ranks.run(PROGRAM, alone).check()
    whole = finished(ranks, tmp_path / "whole", mesh)
    assert resumed_from(tmp_path / "run") == MEMORY
    assert found["losses"] == whole[0]["losses"]


def test_an_optimizer_with_modes_stays_in_its_own(ranks: Ranks, tmp_path: Path) -> None:
    """A save puts it into the other one, which rounds; a snapshot must not, since it may be left out."""
    assert ranks.run(train_with_modes, str(tmp_path / "run"), 1, 6).codes == [-9]
    whole, again, plain = (
        ranks.run(train_with_modes, str(tmp_path / name), every, 0).check()
        for name, every in (("whole", 1), ("run", 1), ("plain", None))
    )
    assert resumed_from(tmp_path / "run") == MEMORY
    assert whole == again == plain


def train_with_modes(folder: str, every: int | None, kill_at: int) -> str:
    from stepmark import Trainer, TrainingArguments
    from tests.support.optimizer_programs import Modes
    from tests.support.programs import Blocks, KillAt, checksum, tiny_model

    model, fields = tiny_model(0.0), {"max_steps": 10, "save_steps": 50, "memory_every": every}
    args = TrainingArguments(
        folder, device="cpu", lr_scheduler_type="constant", resume_from_checkpoint=True, disable_tqdm=True, **fields
    )
    trainer = Trainer(
        model,
        args,
        train_dataset=Blocks(53),
        optimizers=(Modes(model.parameters()), None),
        callbacks=[KillAt(kill_at, None)],
    )
    trainer.train()
    return checksum(trainer)


@pytest.mark.parametrize("place", ["writing", "commit"])
def test_a_kill_while_a_snapshot_is_made_leaves_the_one_before(ranks: Ranks, tmp_path: Path, place: str) -> None:
    given = options(tmp_path / "run")
    assert ranks.run(train_and_die, given, place, 6).codes == [-9]
    memory = memory_of(tmp_path / "run")
    assert memory is not None
    assert [step_of(path) for path in checkpoints(memory)] == [5]
    assert list(memory.glob(".checkpoint-6.*")), "nothing of the newer one is there"
    (found,) = finished(ranks, tmp_path / "run")
    assert resumed_from(tmp_path / "run") == MEMORY
    assert found["weights"] == finished(ranks, tmp_path / "whole")[0]["weights"]


def train_and_die(given: dict[str, Any], place: str, step: int) -> None:
    """Killed where a snapshot of this step is written, or complete but for its name."""
    from stepmark.checkpoint.save import commit, write
    from tests.support import programs

    module: Any = {"writing": write, "commit": commit}[place]
    name = {"writing": "write_header", "commit": "publish"}[place]
    original = getattr(module, name)

    def die(path: Path, *arguments: Any) -> Any:
        if path.is_relative_to(SHARED_MEMORY) and path.name.startswith(f".checkpoint-{step}."):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(path, *arguments)

    setattr(module, name, die)
    programs.train(given)


def test_the_best_checkpoint_is_there_after_a_kill_while_it_was_written(ranks: Ranks, tmp_path: Path) -> None:
    """No snapshot leads past it; that of the step before stays."""
    best = {"save_steps": 2, "eval_steps": 2, "load_best_model_at_end": True, "learning_rate": 0.05}
    given = options(tmp_path / "run", kill_at=4, **best)
    assert ranks.run(train_beside_a_save, given, 2).codes == [-9]
    (found,) = finished(ranks, tmp_path / "run", **best)
    assert resumed_from(tmp_path / "run") == [(1, "memory")]
    assert found["weights"] == finished(ranks, tmp_path / "whole", **best)[0]["weights"]
    assert Path(read_object(tmp_path / "run" / "trainer_state.json")["best_model_checkpoint"]).name == "checkpoint-2"


def train_beside_a_save(given: dict[str, Any], step: int) -> None:
    """The checkpoint of this step is complete but for its name, for as long as the process lives."""
    from stepmark.checkpoint.save import commit
    from tests.support import programs

    module: Any = commit
    original = module.publish

    def publish(path: Path, *arguments: Any) -> Any:
        if not path.is_relative_to(SHARED_MEMORY) and path.name.startswith(f".checkpoint-{step}."):
            threading.Event().wait()
        return original(path, *arguments)

    module.publish = publish
    programs.train(given)


@pytest.mark.parametrize("trouble", ["cleaned", "full"])
def test_training_goes_on_without_shared_memory(ranks: Ranks, tmp_path: Path, trouble: str) -> None:
    """One warning, no more snapshots, and after a kill the checkpoint."""
    given = options(tmp_path / "run", "dp", async_save=False, save_steps=3)
    outcome = ranks.run(train_in_trouble, {**given, "kill_at": 8}, trouble, nproc=2)
    assert -9 in outcome.codes
    warnings = [line for line in "\n".join(outcome.logs).splitlines() if "memory_every" in line]
    assert len(warnings) == 1, outcome.logs
    assert "no more snapshots are taken, and a restart goes on from the newest checkpoint: " in warnings[0]
    assert memory_of(tmp_path / "run") is None
    found = finished(ranks, tmp_path / "run", "dp", save_steps=3)
    assert resumed_from(tmp_path / "run") == [(6, "checkpoint-6")]
    assert found[0]["weights"] == finished(ranks, tmp_path / "whole", "dp")[0]["weights"]


def train_in_trouble(given: dict[str, Any], trouble: str) -> None:
    """After step 4 shared memory is emptied by someone else, or full."""
    from stepmark.filesystem import files
    from tests.support import programs

    original: Any = files.write_at

    def write_at(descriptor: int, data: memoryview, offset: int) -> None:
        place = os.readlink(f"/proc/self/fd/{descriptor}")
        if place.startswith(f"{SHARED_MEMORY}/") and ".checkpoint-4." in place:
            if trouble == "full":
                raise OSError(28, os.strerror(28), place)
            shutil.rmtree(Path(place).parents[1 if "/optimizer/" not in place else 2], ignore_errors=True)
        original(descriptor, data, offset)

    files.write_at = write_at
    programs.train(given)


@pytest.mark.parametrize(
    ("limit", "error"),
    [
        ("disk", "memory_every: 2 snapshots need 17.1 MB, and /dev/shm has 1 MB free; make it larger"),
        ("memory", "memory_every: the run needs .* of host memory for 2 snapshots, and .* are free"),
    ],
)
def test_too_little_shared_memory_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, error: str
) -> None:
    from stepmark.checkpoint import host_memory
    from tests.support import programs

    if limit == "disk":
        usage = types.SimpleNamespace(free=1_000_000)  # for both, but not for what a save wants beside them
        monkeypatch.setattr(memory_snapshots, "shutil", types.SimpleNamespace(disk_usage=lambda path: usage))
    else:
        monkeypatch.setattr(host_memory, "free_host_memory", lambda: {"machine": 1 << 20})
    with pytest.raises(StepmarkError, match=error):
        programs.train(options(tmp_path))
    assert not read_metrics(tmp_path)


def test_ranks_without_memory_in_common_are_refused(tmp_path: Path, ranks: Ranks) -> None:
    outcome = ranks.run(train_on_two_machines, options(tmp_path / "run", "dp"), nproc=2)
    assert outcome.codes != [0, 0]
    assert (
        "memory_every: the ranks need a /dev/shm which all write to, and are on several machines, " in outcome.logs[0]
    )
    assert not checkpoints(tmp_path / "run")


def train_on_two_machines(given: dict[str, Any]) -> None:
    from tests.support import programs

    memory_snapshots.boot_id = lambda: os.environ["RANK"]  # type: ignore[attr-defined]
    programs.train(given)


def test_runs_on_one_machine_do_not_meet(ranks: Ranks, tmp_path: Path) -> None:
    for number, step in enumerate((4, 6)):
        killed(ranks, tmp_path / f"run-{number}", step)
    for number, step in enumerate((4, 6)):
        finished(ranks, tmp_path / f"run-{number}")
        assert resumed_from(tmp_path / f"run-{number}") == [(step - 1, "memory")]


def test_what_dead_runs_have_left_is_removed(ranks: Ranks, tmp_path: Path) -> None:
    """Not what a live run has, or one that may be started again."""
    places = []
    for name in ("gone", "dead", "alive"):
        (tmp_path / name / COORDINATION).mkdir(parents=True)
        places.append(make_memory(tmp_path / name))
        assert places[-1].stat().st_mode & 0o777 == 0o700
    gone, dead, alive = places
    claim = FolderClaim.claim(alive)
    for name in ("gone", "alive"):
        shutil.rmtree(tmp_path / name)
    (tmp_path / "new" / COORDINATION).mkdir(parents=True)
    new = make_memory(tmp_path / "new")
    assert [path.exists() for path in (gone, dead, alive)] == [False, True, True]
    claim.release(entire=True)
    assert make_memory(tmp_path / "new") == new
    assert [path.exists() for path in (dead, alive)] == [True, False]
    for name in ("dead", "new"):
        free_memory(tmp_path / name)
    assert not new.exists()


def test_a_supervised_run_takes_its_snapshot(ranks: Ranks, tmp_path: Path) -> None:
    """Also where it began without a checkpoint, and has saved none."""
    fields = {"logging_steps": 1, "max_steps": 4, "memory_every": 1, "max_restarts": 2}
    for name in ("killed", "plain"):
        (tmp_path / name).mkdir()
        recipe = str(write_recipe(tmp_path / name, **fields))
        site = install(tmp_path / "site", 1, "kill", "batch", once=True, step=3) if name == "killed" else None
        done = commands.run(ranks, tmp_path / name, "train", recipe, "--nproc", "2", site=site, timeout=240)
        assert done.returncode == 0, done.stderr
    assert resumed_from(tmp_path / "killed" / "out") in ([(1, "memory")], [(2, "memory")])  # that of step 2 is made
    assert read_losses(tmp_path / "killed" / "out") == read_losses(tmp_path / "plain" / "out")


def test_snapshots_are_no_saves(ranks: Ranks, tmp_path: Path) -> None:
    """Callbacks, events and status do not hear of them."""
    finished(ranks, tmp_path / "run", save_steps=4)
    events = read_lines(tmp_path / "run" / EVENTS)
    assert [event["step"] for event in events if event["event"] == "saved"] == [4, 8, 10]
    assert read_status(tmp_path / "run")["newest_checkpoint"] == "checkpoint-10"


def kills(folder: Path) -> list[str]:
    path = folder.with_name("kills")
    return path.read_text().splitlines() if path.exists() else []


# What ranks run


def supervise_and_kill(given: dict[str, Any], nproc: int, seed: float, sent: int = signal.SIGKILL) -> dict[str, Any]:
    """Trains, and sends a signal to one rank a few steps later, at any moment or while a snapshot is being written.
    Returns the exit code."""
    folder, chance = Path(given["output_dir"]), random.Random(seed)
    return train_disturbed(given, nproc, lambda started: _kill(started, folder, nproc, chance, signal.Signals(sent)))


def _kill(started: list[ForkedRank], folder: Path, nproc: int, chance: random.Random, sent: signal.Signals) -> None:
    victim, in_save = chance.randrange(nproc), chance.random() < 1 / 2
    wanted = len(read_metrics(folder)) + chance.randint(2, 5)
    while len(read_metrics(folder)) < wanted:
        time.sleep(0.005)
    time.sleep(chance.uniform(0, LONGEST))
    if in_save:
        _wait_for_snapshot(folder)
        time.sleep(chance.uniform(0, 0.02))
    with folder.with_name("kills").open("a") as file:
        file.write(f"{sent.name} rank {victim}{' in a snapshot' if in_save else ''}\n")
    os.kill(started[victim].pid, sent)


def _wait_for_snapshot(folder: Path) -> None:
    while (memory := memory_of(folder)) is not None:
        if any(name.startswith(".checkpoint-") for name in os.listdir(memory)):
            return
        time.sleep(0.0005)
