"""Commands of stepmark in a child of the zygote, which has made the imports; ranks that a command starts are forks of
it. For what does not depend on how a process starts: tests/system/cli/test_cli.py starts real ones."""

from __future__ import annotations

import logging
import os
import runpy
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepmark.__main__ import main
from stepmark.launch import supervisor
from tests.support import interference
from tests.support.forked import run_and_exit
from tests.support.ranks import Ranks

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "STEPMARK_STORE_FD")


def run(
    ranks: Ranks,
    folder: Path,
    *arguments: str,
    site: str | None = None,
    read: bool = True,
    timeout: float = 180,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Runs `stepmark ARGUMENTS` in the folder, with further environment variables.

    Args:
        ranks: The zygote.
        folder: The working directory; its `stdout` and `stderr` receive what is printed.
        arguments: The command line.
        site: Of `interference.install`, for the ranks that it starts.
        read: Whether what it prints is read; if not, its readers have gone before it starts.
        timeout: Seconds.
        variables: Of the environment.
    """
    return _started(ranks, "call", folder, arguments, read, timeout, site, **variables)


def supervise(
    ranks: Ranks, folder: Path, *script: str, timeout: float = 240, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a Python file with its arguments as two supervised ranks, with further environment variables; otherwise like
    `run`."""
    return _started(ranks, "call_supervisor", folder, script, True, timeout, **variables)


def _started(
    ranks: Ranks,
    program: str,
    folder: Path,
    arguments: Sequence[str],
    read: bool,
    timeout: float,
    *more: str | None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    environment = {"STEPMARK_CACHE": str(folder / "cache"), **variables}
    given = (list(arguments), str(folder), read, *more)
    outcome = ranks.run(f"{__name__}:{program}", *given, timeout=timeout, environment=environment)
    told = [(folder / name).read_text() if read else "" for name in ("stdout", "stderr")]
    (code,) = outcome.codes
    assert code is not None, f"longer than {timeout} seconds:\n{told[1]}"
    return subprocess.CompletedProcess(list(arguments), code, *told)


def call(arguments: list[str], folder: str, read: bool, site: str | None) -> None:
    """The command, in a child of the zygote."""

    class Rank(ForkedRank):
        def be(self, command: Sequence[str]) -> None:
            if site is not None:
                interference.apply(Path(site))
            main(command[4:])  # of python -P -m stepmark

    enter(folder, read)
    fork_ranks(Rank)
    main(arguments)


def call_supervisor(script: list[str], folder: str, read: bool) -> None:
    """The supervisor, in a child of the zygote."""

    class Rank(ForkedRank):
        def be(self, command: Sequence[str]) -> None:
            sys.argv = list(command)
            runpy.run_path(command[0], run_name="__main__")

    enter(folder, read)
    fork_ranks(Rank)
    sys.exit(supervisor.supervise(script, 2))


def train_disturbed(
    options: dict[str, Any], nproc: int, disturb: Callable[[list[ForkedRank]], object]
) -> dict[str, Any]:
    """Supervised ranks of `programs.train`, in a child of the zygote. `disturb`, in a thread, gets them as they start.
    Returns the exit code."""
    from tests.support import programs
    from tests.support.zygote import leave_group

    started: list[ForkedRank] = []

    class Rank(ForkedRank):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            started.append(self)

        def be(self, command: Sequence[str]) -> None:
            programs.train(options)
            leave_group()

    fork_ranks(Rank)
    supervisor.GRACE_SECONDS = 1.0  # the surviving ranks would wait for the other one
    threading.Thread(target=disturb, args=(started,), daemon=True).start()
    return {"code": supervisor.supervise(["rank"], nproc)}


def enter(folder: str, read: bool) -> None:
    """Goes into the folder, and prints there, or where nobody reads."""
    logging.getLogger().handlers.clear()  # of torch_xla, which says at its import which device it takes
    os.chdir(folder)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if read else closed_pipe(), number)


def fork_ranks(kind: type[ForkedRank]) -> None:
    """Of the supervisor alone: ranks start processes of their own."""
    supervisor.subprocess = types.SimpleNamespace(Popen=kind)  # type: ignore[attr-defined,assignment]


def closed_pipe() -> int:
    """Where nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


class ForkedRank:
    """The part of subprocess.Popen that the supervisor uses."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], start_new_session: bool, pass_fds: tuple[int, ...] = ()
    ) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            run_and_exit(lambda: self._start(command, env, start_new_session))

    def poll(self) -> int | None:
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def be(self, command: Sequence[str]) -> None:
        """What the rank does."""
        raise NotImplementedError

    def _start(self, command: Sequence[str], env: Mapping[str, str], start_new_session: bool) -> None:
        if start_new_session:
            os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        os.environ.update(env)
        supervisor.follow_supervisor()
        self.be(command)


def slurm_task(path: str, folder: str, port: int) -> None:
    """A task of a Slurm step on one node: what the launcher of the tests has set is forgotten."""
    rank = os.environ["RANK"]
    for name in LAUNCHERS:
        os.environ.pop(name, None)
    step = {
        "MASTER_PORT": str(port),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
    }
    os.environ.update(step, SLURM_PROCID=rank, SLURM_LOCALID=rank)
    os.chdir(folder)
    main(["train", path])
