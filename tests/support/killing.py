"""A supervised run of two ranks that is killed at a random moment. It runs in a child of the zygote.

The supervisor is the real one, except that it forks its ranks, which saves the imports.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepmark.launch import supervisor

_OPTIONS: dict[str, Any] = {}


class ForkedRank:
    """The part of subprocess.Popen that the supervisor uses."""

    def __init__(
        self, command: list[str], env: Mapping[str, str], pass_fds: tuple[int, ...], start_new_session: bool
    ) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _be_rank(env, start_new_session)

    def poll(self) -> int | None:
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _be_rank(env: Mapping[str, str], start_new_session: bool) -> None:
    code = 1
    try:
        if start_new_session:
            os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        os.environ.update(env)
        supervisor.follow_supervisor()
        from tests.support import programs
        from tests.support.zygote import leave_group

        programs.train(_OPTIONS)
        leave_group()
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def supervise_and_kill(options: dict[str, Any], seed: int, longest: float) -> dict[str, Any]:
    """Trains, and kills rank 0, rank 1, both, or the supervisor: within `longest` seconds of the first new step, or in
    one of three cases while a save is being written. Returns the exit code if the supervisor survives. Every kill adds
    a line to the file `kills` in the output folder."""
    _OPTIONS.update(options)
    started: list[ForkedRank] = []

    def start(*arguments: Any, **named: Any) -> ForkedRank:
        started.append(ForkedRank(*arguments, **named))
        return started[-1]

    # Of the supervisor alone: ranks start processes of their own.
    supervisor.subprocess = types.SimpleNamespace(Popen=start)  # type: ignore[attr-defined,assignment]
    supervisor.GRACE_SECONDS = 1.0  # the surviving rank would wait for the other one
    chance = random.Random(seed)
    killer = threading.Thread(target=_kill, args=(started, Path(options["output_dir"]), chance, longest), daemon=True)
    killer.start()
    return {"code": supervisor.supervise(["rank"], 2)}


def _kill(started: list[ForkedRank], folder: Path, chance: random.Random, longest: float) -> None:
    victim, in_save = chance.choice(["rank 0", "rank 1", "ranks", "supervisor"]), chance.random() < 1 / 3
    _wait_for_progress(folder)
    if in_save:
        time.sleep(chance.uniform(0, longest / 2))
        _wait_for_save(folder)
        time.sleep(chance.uniform(0, 0.03))
    else:
        time.sleep(chance.uniform(0, longest))
    with open(folder / "kills", "a") as file:
        file.write(f"{victim}{' in a save' if in_save else ''}\n")
    if victim == "supervisor":
        os.kill(os.getpid(), signal.SIGKILL)
    for rank, process in enumerate(started):
        if victim in ("ranks", f"rank {rank}"):
            os.kill(process.pid, signal.SIGKILL)


def _wait_for_progress(folder: Path) -> None:
    metrics = folder / "metrics.jsonl"
    size = metrics.stat().st_size if metrics.exists() else 0
    while not metrics.exists() or metrics.stat().st_size == size:
        time.sleep(0.005)


def _wait_for_save(folder: Path) -> None:
    while not any(name.startswith(".checkpoint-") for name in os.listdir(folder)):
        time.sleep(0.001)
