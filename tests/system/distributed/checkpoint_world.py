"""Real ranks for tests: forked processes that talk through gloo."""

from __future__ import annotations

import os
import pickle
import select
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class RankError(Exception):
    """A rank has raised; the message is its traceback."""


def start_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[tuple[int, int]]:
    """Forks `size` ranks that call `function(rank, *arguments)`; returns (process, pipe) of each."""
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # imports much of torch, here instead of in each rank
    store = Path(tempfile.mkdtemp(prefix="stepmark-store-")) / "store"
    return [_fork(rank, size, store, function, arguments) for rank in range(size)]


def _fork(
    rank: int, size: int, store: Path, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[int, int]:
    reading, writing = os.pipe()
    process = os.fork()
    if process:
        os.close(writing)
        return process, reading
    os.close(reading)
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size)
        answer = (True, function(rank, *arguments))
    except BaseException:
        answer = (False, traceback.format_exc())
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(pickle.dumps(answer))
    os._exit(0)


def join_ranks(ranks: list[tuple[int, int]], timeout: float = 60.0) -> list[Any]:
    """Each rank's result; None of one that was killed. Raises RankError where one raised, or did not end in time."""
    results: list[Any] = []
    errors: list[str] = []
    deadline = time.monotonic() + timeout
    for number, (process, pipe) in enumerate(ranks):
        data = b""
        while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            block = os.read(pipe, 1 << 20)
            if not block:
                break
            data += block
        else:
            errors.append(f"rank {number} did not end in time")
            os.kill(process, signal.SIGKILL)
        os.close(pipe)
        os.waitpid(process, 0)
        good, value = pickle.loads(data) if data else (True, None)
        results.append(value if good else None)
        errors.extend([] if good else [f"rank {number}: {value}"])
    if errors:
        raise RankError("\n".join(errors))
    return results


def run_ranks(size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 60.0) -> list[Any]:
    """Runs `function(rank, *arguments)` on `size` ranks; their results."""
    return join_ranks(start_ranks(size, function, *arguments), timeout)
