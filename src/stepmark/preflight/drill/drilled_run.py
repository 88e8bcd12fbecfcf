"""A short run of a drill, in processes that train as `stepmark train` does, and what it leaves.

Where a launcher has started the drill, there is a process of it for each rank; all but the first `follow`.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.checkpoint_folders import checkpoints, step_of
from stepmark.filesystem import files
from stepmark.filesystem.json_files import read_lines
from stepmark.launch.supervisor import SUPERVISOR
from stepmark.launch.world import World
from stepmark.liveness.process_exit import INTERRUPTED
from stepmark.trainer.run_folder.memory_snapshots import newest_snapshot
from stepmark.trainer.run_folder.run_log import EVENTS, METRICS

POLL = 0.05  # seconds
GRACE = 15.0  # seconds in which ranks end after another one


def follow(world: World, store: Any) -> None:
    """Starts the rank of this place whenever the first process starts its own; returns when that has ended."""
    for number in count():
        order = json.loads(store.get(f"drill/{number}"))
        if not order:
            break
        process, end = _start(world, *order), None
        while process.poll() is None:
            if end is None and store.check([f"drill/{number}/0"]):
                end = time.monotonic() + GRACE
            if end is not None and time.monotonic() > end:
                process.kill()
            time.sleep(POLL)
        store.set(f"drill/{number}/{world.rank}", str(process.returncode))
    store.set(f"drill/end/{world.rank}", "")


def dismiss(world: World, store: Any) -> None:
    """Ends the processes that `follow`. This one may serve their store, so it waits until they have heard it."""
    store.set(f"drill/{DrilledRun.attempts}", "null")
    with contextlib.suppress(RuntimeError):
        store.wait([f"drill/end/{rank}" for rank in range(1, world.size)], timedelta(seconds=2 * GRACE))


def _start(world: World, command: Sequence[str], output: str, port: int) -> subprocess.Popen[bytes]:
    place = {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"} if world.size > 1 else {}
    environment = {**os.environ, **place, SUPERVISOR: str(os.getpid())}  # so that it ends with this process
    with open(f"{output}.{world.rank}.txt", "ab") as file:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file)


class DrilledRun:
    """A run in a folder of its own, which `command` trains. `start` makes an attempt, which is killed after `limit`
    seconds, and comes before all that is about a process. `store`: of the processes of the drill, if they are
    several."""

    attempts = 0  # of all runs

    def __init__(self, folder: Path, command: Sequence[str], limit: float, world: World, store: Any) -> None:
        self.folder, self._command, self._limit = folder, list(command), limit
        self._world, self._store = world, store
        self._process: subprocess.Popen[bytes]  # of the last attempt
        self.began = self.disturbed = self.ended = 0.0  # of the last attempt, in seconds since the Unix epoch

    def start(self, ranks: int) -> None:
        """Starts an attempt; under a launcher its ranks are those that it has started."""
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        command = [*self._command, *(["--nproc", str(ranks)] if self._store is None else [])]
        if self._store is not None:
            self._store.set(f"drill/{DrilledRun.attempts}", json.dumps([command, str(self.folder), port]))
        self._process, self.began = _start(self._world, command, str(self.folder), port), time.time()

    def until(self, condition: Callable[[], bool]) -> bool:
        """Whether the condition came true before the attempt ended."""
        while not condition():
            if time.time() > self.began + self._limit:
                self.kill()
            if self._process.poll() is not None:
                return False
            time.sleep(POLL)
        return True

    def end(self) -> int:
        """Waits until all ranks have ended. Returns the attempt's exit code: of a failure, if there was one."""
        self.until(lambda: False)
        self.ended, codes = time.time(), [self._process.returncode]
        if self._store is not None:
            names = [f"drill/{DrilledRun.attempts}/{rank}" for rank in range(self._world.size)]
            self._store.set(names[0], str(codes[0]))
            codes += [int(self._store.get(name)) for name in names[1:]]
        DrilledRun.attempts += 1
        return next((code for code in codes if code not in (0, INTERRUPTED)), max(codes))

    def send(self, number: int, *, to_rank: bool = False) -> None:
        """Sends a signal to the run, or to one of its ranks."""
        self.disturbed = time.time()
        with contextlib.suppress(ProcessLookupError):
            os.kill([self._process.pid, *self._ranks()][-1 if to_rank else 0], number)

    def fill_disk(self) -> None:
        """From now on, no file of these ranks grows beyond half of the largest one, as if the disk were full."""
        self.disturbed = time.time()
        largest = max(path.stat().st_size for path in self.folder.rglob("*.safetensors"))
        for process in self._ranks():
            with contextlib.suppress(ProcessLookupError):
                hard = resource.prlimit(process, resource.RLIMIT_FSIZE)[1]
                resource.prlimit(process, resource.RLIMIT_FSIZE, (largest // 2, hard))

    def kill(self) -> None:
        """Kills the run: the kernel kills ranks with their supervisor."""
        if self._process.poll() is None:
            ranks, self.disturbed = self._ranks(), time.time()
            self._process.kill()
            self._process.wait()
            while any(Path(f"/proc/{rank}/exe").exists() for rank in ranks) and time.time() < self.disturbed + GRACE:
                time.sleep(POLL)

    def _ranks(self) -> list[int]:
        """The ranks that this process has started, by their process ids."""
        own = self._process.pid
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
            return [own] if self._store is not None else [int(each) for each in children]
        return []

    @property
    def steps(self) -> list[int]:
        """The steps of its complete checkpoints, newest first; 0 is the last."""
        return [*(step_of(path) or 0 for path in checkpoints(self.folder)), 0]

    @property
    def newest(self) -> int:
        """The step that it has to go on from: of a snapshot in memory, or else of its newest checkpoint."""
        snapshot = newest_snapshot(self.folder)
        return self.steps[0] if snapshot is None else step_of(snapshot) or 0

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return max((line["step"] for line in self.metrics()), default=0)

    def error(self, code: int) -> str:
        """The last one that was printed by an attempt that has ended with this code."""
        lines = Path(f"{self.folder}.{self._world.rank}.txt").read_text(errors="replace").splitlines()
        said = next((line for line in reversed(lines) if line.startswith("error: ")), "")
        said = said or "no error was printed; a run that takes too long is killed, and lasts less with --max_steps"
        return f"exit code {code} after {self.ended - self.began:.0f} s: {said.removeprefix('error: ')}"

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.folder / EVENTS) if line.get("event") in kinds]

    def metrics(self, name: str = "loss") -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that have a value of this name."""
        return [line for line in read_lines(self.folder / METRICS) if name in line]

    def result(self) -> tuple[dict[int, str], str]:
        """What has to be the same: the loss and gradient norm of every step, and checksums of the final model."""
        losses = {line["step"]: f"{line['loss']} {line.get('grad_norm')}" for line in self.metrics()}
        weights = (files.file_checksum(path)[1] for path in sorted(self.folder.glob("*.safetensors")))
        return losses, " ".join(weights)
