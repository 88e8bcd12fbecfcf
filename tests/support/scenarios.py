"""Real saves and restores of two ranks in which a call fails, and checks of the checkpoints that remain."""

from __future__ import annotations

import logging
import os
import pickle
import random
import select
import shutil
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.format.checkpoint_folders import checkpoints, step_of
from stepmark.checkpoint.format.verify import verify
from stepmark.errors import CheckpointError
from stepmark.liveness import heartbeat
from stepmark.liveness.host_group import HostGroup

from .checkpoint_states import same, seeded_state, snapshot
from .disk import Disk
from .faults import Faults, read_journal

RANKS = 2
TIMEOUT = 4.0  # seconds a phase may last: room for a busy machine
DEADLINE = 60.0  # seconds after which a point counts as hanging
State = dict[str, Any]


class PairGroup(HostGroup):
    """Two ranks connected by a socket."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        super().__init__(rank, RANKS)
        self._connection = connection

    def all_gather(self, value: Any) -> list[Any]:
        data = pickle.dumps(value)
        try:
            self._connection.sendall(struct.pack("<Q", len(data)) + data)
            other = pickle.loads(self._receive(struct.unpack("<Q", self._receive(8))[0]))
        except OSError as error:
            raise RuntimeError(f"connection closed by peer: {error}") from error
        return [value, other] if self.rank == 0 else [other, value]

    def broadcast(self, value: Any = None, source: int = 0) -> Any:
        return self.all_gather(value)[source]

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            block = self._connection.recv(size - len(data))
            if not block:
                raise OSError("end of file")
            data += block
        return data


def state_of(value: int) -> State:
    """A model, its optimizer and a nest, all of whose values follow from one number; 0 is for restoring into."""
    state = seeded_state(value, nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 40)))
    return {**state, "nest": {"t": torch.full((50,), float(value)), "at": value}}


def equal(one: State, other: State) -> bool:
    """Whether all values of the two are the same, bit for bit."""
    both = [(snapshot(state["model"], state["optimizer"]), state["nest"]) for state in (one, other)]
    return same(both[0], both[1])


def checkpointer(folder: Path, group: HostGroup | None = None, **options: Any) -> Checkpointer:
    return Checkpointer(
        folder, group=group or HostGroup(), max_file_size=9000, threads=1, save_timeout=TIMEOUT, **options
    )


def save(folder: Path, group: HostGroup, step: int, value: int, **options: Any) -> None:
    with checkpointer(folder, group, **options) as own:
        own.save(step, state_of(value), block=True)


def save_behind(folder: Path, group: HostGroup, step: int, value: int) -> None:
    """An error of the first save must come up by the next call; the second is never begun then."""
    with checkpointer(folder, group) as own:
        own.save(step, state_of(value))
        own.wait()
        own.check()


def restore_and_save(folder: Path, group: HostGroup, step: int, value: int) -> None:
    with checkpointer(folder, group) as own:
        state = state_of(0)
        assert own.restore(state) == 1
        assert equal(state, state_of(1))
        own.save(step, state_of(value), block=True)


@dataclass(frozen=True)
class Scenario:
    """`prepare` makes the run's folder; `act` saves `value` as `step` in two ranks. `before` is what is restored if it
    does not come to that: step and value, None for nothing. `gone` are checkpoints that must not be there at the end of
    a good run."""

    name: str
    act: Callable[..., None]
    step: int
    before: tuple[int, int] | None
    exchange: bool = True
    keep_last: int | None = None

    def prepare(self, folder: Path) -> None:
        if self.name == "first":
            return
        with checkpointer(folder) as own:
            own.save(1, state_of(1), block=True)
            if self.name in ("retention", "aside"):
                own.save(2, state_of(2), block=True)
            if self.name == "recover":
                own.save(3, state_of(3), block=True)
        if self.name == "aside":
            path = next((folder / "checkpoint-2").glob("model-00002*"))
            path.write_bytes(path.read_bytes()[:-1] + b"!")
        if self.name == "recover":
            (folder / "checkpoint-3").rename(folder / ".replaced-checkpoint-3.dead-000001")
            shutil.copytree(folder / "checkpoint-1", folder / ".deleted-checkpoint-2.dead-000002")
            shutil.copytree(folder / "checkpoint-1", folder / ".checkpoint-4.dead-000003")
            (folder / ".stepmark" / "deadbeef").mkdir(parents=True)
            (folder / ".stepmark" / "deadbeef" / "claimed").touch()

    def run(self, folder: Path, group: HostGroup) -> None:
        options = {} if self.keep_last is None else {"keep_last": self.keep_last}
        self.act(folder, group, self.step, self.step + 100, **options)


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("first", save, 1, None),
        Scenario("again", save, 1, (1, 1)),
        Scenario("again-without-exchange", save, 1, (1, 1), exchange=False),
        Scenario("retention", save, 3, (2, 2), keep_last=1),
        Scenario("aside", restore_and_save, 3, (1, 1)),
        Scenario("recover", save, 4, (3, 3)),
        Scenario("behind", save_behind, 1, (1, 1)),
    )
}


@dataclass(frozen=True)
class Point:
    """The fault `kind` at call number `at` of rank `rank`. `alone`: the other rank has to find out by itself; else
    it is killed, as by a launcher."""

    scenario: str
    kind: str
    rank: int
    at: int
    alone: bool = False


def run_point(point: Point, prepared: Path, folder: Path) -> tuple[bool, str]:
    """Whether the process reached that call, and the problem afterwards ("" for none)."""
    logging.disable(logging.CRITICAL)
    scenario = SCENARIOS[point.scenario]
    world, journal = folder / "world", folder / "journal"
    shutil.copytree(prepared, world)
    disk = Disk(world) if point.kind == "power-loss" else None
    if disk:
        heartbeat.STALE = 2.0  # a machine that lost its power takes longer than a minute to come back
    endings = _run_ranks(point, scenario, world / "run", journal if disk else None, folder)
    reached = (folder / "reached").exists() or any(ending == "killed" for ending in endings)
    wrong = [
        ending for ending in endings if ending not in ("good", "killed", "ended") and not ending.startswith("error")
    ]
    if wrong:
        return reached, f"{point}: {wrong}"
    committed = (folder / "committed").exists()
    if point.kind == "short-write" and "good" not in endings:
        return reached, f"{point}: a short write made the save fail: {endings}"
    if disk is None:
        return reached, _said(point, endings, lambda: check(scenario, world / "run", committed))
    for record in read_journal(journal):
        disk.apply(record)
    for number in range(3):
        image = folder / f"image-{number}"
        disk.image(image, random.Random(f"{point}-{number}"), worst=number == 0)
        problem = _said(point, endings, lambda image=image: check(scenario, image / "run", committed))  # type: ignore[misc]
        if problem:
            return reached, f"image {number}: {problem}"
    return reached, ""


def _said(point: Point, endings: list[str], checked: Callable[[], None]) -> str:
    try:
        checked()
    except (AssertionError, CheckpointError, OSError):
        return f"{point} {endings}: {traceback.format_exc()}"
    return ""


def check(scenario: Scenario, folder: Path, committed: bool) -> None:
    """The old state or the new one is restored, bit for bit; the next save works, and leaves nothing else."""
    folder.mkdir(exist_ok=True)
    for path in checkpoints(folder):
        damaged = scenario.name == "aside" and path.name == "checkpoint-2"
        faults = verify(path).faults
        assert damaged or not faults, f"{path} is corrupted: {faults}"
    new = (scenario.step, scenario.step + 100)
    with checkpointer(folder) as own:
        state = state_of(0)
        step = own.restore(state)
        found = None if step is None else (step, state["nest"]["at"])
        assert found in ([new] if committed else [new, scenario.before]), f"restored {found}, committed: {committed}"
        if found is not None:
            assert equal(state, state_of(found[1])), "a mix of both"
        own.save(9, state_of(9), block=True)
    state = state_of(0)
    with checkpointer(folder) as own:
        assert own.restore(state) == 9
        assert equal(state, state_of(9))
    left = [path.name for path in folder.iterdir() if step_of(path) is None]
    left = [name for name in left if not name.startswith("damaged-checkpoint-2") and name != ".stepmark"]
    assert not left, f"left over: {left}"
    claims = [path for path in (folder / ".stepmark").iterdir() if path.is_dir() and not path.name.startswith(".")]
    assert not claims, "a claim is left over"


def _run_ranks(point: Point, scenario: Scenario, run: Path, journal: Path | None, folder: Path) -> list[str]:
    """How each rank ended: good, error: …, killed (by the fault), ended (by the launcher), or the problem."""
    pair = socket.socketpair()
    pipes, processes = [], []
    for rank in range(RANKS):
        reading, writing = os.pipe()
        process = os.fork()
        if not process:
            pair[1 - rank].close()
            at = point.at if rank == point.rank else 0
            faults = Faults(point.kind, at, journal, exchange=scenario.exchange)
            os.write(writing, _rank(scenario, run, PairGroup(rank, pair[rank]), faults, folder).encode())
            os._exit(0)
        os.close(writing)
        pipes.append(reading)
        processes.append(process)
    for connection in pair:
        connection.close()
    return _collect(point, processes, pipes)


def _rank(scenario: Scenario, run: Path, group: HostGroup, faults: Faults, folder: Path) -> str:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # stacks that the watchdog prints
    faults.install()
    try:
        scenario.run(run, group)
        (folder / "committed").touch()
        return "good"
    except CheckpointError as error:
        return f"error: {error}"
    except BaseException:
        return f"not a CheckpointError: {traceback.format_exc()}"
    finally:
        if faults.reached:
            (folder / "reached").touch()


def _collect(point: Point, processes: list[int], pipes: list[int]) -> list[str]:
    endings = [""] * RANKS
    deadline = time.monotonic() + DEADLINE
    waiting = dict(zip(pipes, range(RANKS), strict=True))
    while waiting:
        ready = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))[0]
        if not ready:
            for rank in waiting.values():
                endings[rank] = "it hangs"
                os.kill(processes[rank], signal.SIGKILL)
        for pipe in ready or list(waiting):
            rank = waiting.pop(pipe)
            text = os.read(pipe, 1 << 16).decode()
            endings[rank] = endings[rank] or text or "killed"
            os.close(pipe)
            if not text and not point.alone:
                for other in waiting.values():
                    os.kill(processes[other], signal.SIGKILL)
    for rank, process in enumerate(processes):
        status = os.waitpid(process, 0)[1]
        if endings[rank] == "killed" and os.WIFEXITED(status):  # by the watchdog, for example
            endings[rank] = "error: ended itself"
    return endings


def prepare_all(folder: Path, names: list[str]) -> None:
    """Makes the folders that the scenarios begin with, in a separate process."""
    process = os.fork()
    if not process:
        try:
            for name in names:
                (folder / name).mkdir(parents=True)
                SCENARIOS[name].prepare(folder / name / "run")
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0


def run_points(points: Iterator[Point], folder: Path, at_once: int = 4) -> Iterator[tuple[Point, bool, str]]:
    """Runs the points, each in a separate process; yields the results of `run_point`."""
    running: dict[int, tuple[Point, int, Path]] = {}
    count, more = 0, True
    while more or running:
        while more and len(running) < at_once:
            point = next(points, None)
            if point is None:
                more = False
                break
            place = folder / f"point-{count}"
            count += 1
            reading, process = _fork_point(point, folder / "prepared" / point.scenario, place)
            running[reading] = (point, process, place)
        for pipe in select.select(list(running), [], [])[0] if running else []:
            point, process, place = running.pop(pipe)
            with os.fdopen(pipe, "rb") as stream:
                data = stream.read()
            os.waitpid(process, 0)
            shutil.rmtree(place, ignore_errors=True)
            reached, problem = pickle.loads(data) if data else (True, f"{point}: the check died")
            yield point, reached, problem


def _fork_point(point: Point, prepared: Path, place: Path) -> tuple[int, int]:
    reading, writing = os.pipe()
    process = os.fork()
    if process:
        os.close(writing)
        return reading, process
    try:
        place.mkdir()
        answer = run_point(point, prepared, place)
    except BaseException:
        answer = (True, f"{point}: {traceback.format_exc()}")
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(pickle.dumps(answer))
    sys.stdout.flush()
    os._exit(0)
