"""A supervised run of two ranks that is killed at a random moment. It runs in a child of the zygote.

The supervisor is the real one, except that it forks its ranks, which saves the imports.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepmark.launch import supervisor
from tests.support.commands import ForkedRank

_OPTIONS: dict[str, Any] = {}


class KilledRank(ForkedRank):
    def be(self, command: Sequence[str]) -> None:
        from tests.support import programs
        from tests.support.zygote import leave_group

        programs.train(_OPTIONS)
        leave_group()


def supervise_and_kill(options: dict[str, Any], seed: int, longest: float) -> dict[str, Any]:
    """Trains, and kills rank 0, rank 1, both, or the supervisor: within `longest` seconds of the first new step, or in
    one of three cases while a save is being written. Returns the exit code if the supervisor survives. Every kill adds
    a line to the file `kills` in the output folder."""
    _OPTIONS.update(options)
    started: list[KilledRank] = []

    def start(*arguments: Any, **named: Any) -> KilledRank:
        started.append(KilledRank(*arguments, **named))
        return started[-1]

    # Of the supervisor alone: ranks start processes of their own.
    supervisor.subprocess = types.SimpleNamespace(Popen=start)  # type: ignore[attr-defined,assignment]
    supervisor.GRACE_SECONDS = 1.0  # the surviving rank would wait for the other one
    chance = random.Random(seed)
    killer = threading.Thread(target=_kill, args=(started, Path(options["output_dir"]), chance, longest), daemon=True)
    killer.start()
    return {"code": supervisor.supervise(["rank"], 2)}


def _kill(started: list[KilledRank], folder: Path, chance: random.Random, longest: float) -> None:
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
