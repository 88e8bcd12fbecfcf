"""A parent that forks ranks, so that torch, transformers and torch_xla are imported once instead of in every rank.

It reads one job per line from a connection to a socket (null: the end), forks `nproc` children that call
`function(*arguments)`, and writes one line with their exit codes and results. A child's output goes to
`<folder>/rank-<r>.log`. Every connection has a fork of its own, so that processes of tests share the imports, which are
made for the first. It ends with its standard input.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.forked import run_and_exit

POLL_SECONDS = 0.01


def main() -> None:
    descriptor, *modules = sys.argv[1:]
    listener = socket.socket(fileno=int(descriptor))
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            break
        connection, _ = listener.accept()
        for module in modules:
            importlib.import_module(module)
        gc.freeze()  # so that collecting in the children copies none of the pages that they share with this process
        if not os.fork():
            listener.close()
            run_and_exit(partial(serve, connection))
        connection.close()


def serve(connection: socket.socket) -> None:
    with connection.makefile("rw") as file:
        print(json.dumps({"ready": True}), file=file, flush=True)
        for line in file:
            if line == "null\n":
                break
            print(json.dumps(run_job(json.loads(line))), file=file, flush=True)


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    folder, nproc = Path(job["folder"]), job["nproc"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        children = []
        for rank in range(nproc):
            child = os.fork()
            if child == 0:
                run_and_exit(partial(be_rank, rank, job, listener))
            children.append(child)
    codes = wait(children, time.monotonic() + job["timeout"])
    results = [read(folder / f"rank-{rank}.json") for rank in range(nproc)]
    return {"codes": codes, "results": results}


def wait(children: list[int], deadline: float) -> list[int | None]:
    """Exit codes (negative for a signal); None for a child that was killed at the deadline. When one fails, the
    others have five more seconds."""
    codes: dict[int, int | None] = {}
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    codes[child] = os.waitstatus_to_exitcode(status)
                    if codes[child] != 0:
                        deadline = min(deadline, time.monotonic() + 5)
        if time.monotonic() > deadline:
            for child in children:
                if child not in codes:
                    os.kill(child, 9)
                    os.waitpid(child, 0)
                    codes[child] = None
        time.sleep(POLL_SECONDS)
    return [codes[child] for child in children]


def read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def be_rank(rank: int, job: dict[str, Any], listener: socket.socket) -> None:
    folder = Path(job["folder"])
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(environment(rank, job, listener))
    if rank:
        listener.close()  # or it would wait for an answer where rank 0 has ended
    module, name = job["function"].split(":")
    result = getattr(importlib.import_module(module), name)(*job["arguments"])
    (folder / f"rank-{rank}.json").write_text(json.dumps(result))
    leave_group()


def leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def environment(rank: int, job: dict[str, Any], listener: socket.socket) -> dict[str, str]:
    if job["nproc"] == 1:
        return dict(job["environment"])
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job["nproc"]),
        "LOCAL_WORLD_SIZE": str(job["nproc"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
        "STEPMARK_STORE_FD": str(listener.fileno()),
        **job["environment"],
    }


if __name__ == "__main__":
    main()
