"""A rank that stops in the middle of a save leaves nobody waiting, and is named."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.operation import Operation
from stepmark.sharding.layout import Layout, Shard

TIMEOUT = 6.0  # seconds, three times what 14 processes on two busy cores need for a phase
PHASES = ["before", "joining", "planning", "copying", "writing", "finalizing", "committing"]


def train_and_save(rank: int, folder: Path, stopped: int, where: str) -> None:
    """Two ranks save, and then meet in a step of training, with the other stopped in one of the phases."""
    if rank == stopped:
        enter = Operation.enter

        def enter_and_stop(self: Operation, name: str) -> None:
            enter(self, name)
            if name == where:
                signal.raise_signal(signal.SIGSTOP)  # this thread, at once; not whichever wakes first

        Operation.enter = enter_and_stop  # type: ignore[method-assign]
    with Checkpointer(folder / "run", save_timeout=TIMEOUT) as checkpointer:
        checkpointer.claim()
        if rank == stopped and where == "before":
            signal.raise_signal(signal.SIGSTOP)
        own = Shard(torch.ones(4), Layout.box((8,), (4 * rank,), (4,)))  # each rank has a file to seal
        checkpointer.save(1, {"nest": {"t": torch.randn(3 << 20), "u": own}})
        dist.barrier()


def start(folder: Path, stopped: int, where: str) -> list[int]:
    """Forks the two ranks, each with its standard error in a file."""
    processes = []
    for rank in range(2):
        process = os.fork()
        if not process:
            log = os.open(folder / f"rank-{rank}", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 2)
            torch.set_num_threads(1)
            store = dist.FileStore(str(folder / "store"), 2)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
            code = 0
            try:
                train_and_save(rank, folder, stopped, where)
            except BaseException as error:
                os.write(2, f"raised: {error}\n".encode())
                code = 1
            os._exit(code)
        processes.append(process)
    return processes


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_named_and_the_job_ends(tmp_path: Path, stopped: int) -> None:
    jobs = {}
    needed = PHASES if stopped == 0 else PHASES[:-1]  # rank 0 commits, without asking the others
    for where in needed:
        (tmp_path / where).mkdir()
        jobs[where] = start(tmp_path / where, stopped, where)
    deadline = time.monotonic() + 5 * TIMEOUT  # a rank that nobody ends would wait for ever
    codes: dict[str, int | None] = dict.fromkeys(needed)
    while None in codes.values() and time.monotonic() < deadline:
        for where in [name for name, code in codes.items() if code is None]:
            process, status = os.waitpid(jobs[where][1 - stopped], os.WNOHANG)
            codes[where] = os.waitstatus_to_exitcode(status) if process else None
        time.sleep(0.05)
    for where in needed:
        os.kill(jobs[where][stopped], signal.SIGKILL)
        os.waitpid(jobs[where][stopped], 0)
        if codes[where] is None:
            os.kill(jobs[where][1 - stopped], signal.SIGKILL)
            os.waitpid(jobs[where][1 - stopped], 0)
    logs = {where: (tmp_path / where / f"rank-{1 - stopped}").read_text() for where in needed}
    for where in needed:
        doing = {"before": "has not joined", "joining": "joining"}.get(where, where)
        assert codes[where] == 1, (where, codes, logs[where])
        assert f"rank {stopped} ({doing}" in logs[where], (where, logs[where])
        assert "the stacks of all threads" in logs[where]
        assert "in train_and_save" in logs[where]
        assert not list((tmp_path / where / "run").glob("checkpoint-*"))


def test_a_phase_that_hangs_is_said_to_with_all_stacks(tmp_path: Path) -> None:
    """Nobody but this rank is there, and it is stuck in the file system: it ends by itself."""
    process = os.fork()
    if not process:
        log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 2)
        from stepmark.checkpoint.save import write as writer

        writer.write_extents = lambda *_, **__: stuck_in_the_file_system()  # type: ignore[assignment]
        from stepmark.checkpoint.save import write as saving

        saving.write_extents = writer.write_extents
        checkpointer = Checkpointer(tmp_path, save_timeout=1.0)
        checkpointer.save(1, {"nest": {"t": torch.ones(3)}})
        time.sleep(60)  # training, which asks for nothing
        os._exit(0)
    _, status = os.waitpid(process, 0)
    log = (tmp_path / "log").read_text()
    assert os.waitstatus_to_exitcode(status) == 1
    assert "save of step 1: rank 0 (writing) has not ended this phase within 1 s (save_timeout)" in log
    assert "stuck_in_the_file_system" in log
    assert "error: rank 0:" in log


def stuck_in_the_file_system() -> None:
    time.sleep(60)


def test_a_process_that_holds_the_interpreter_is_ended(tmp_path: Path) -> None:
    """Nothing of Python runs, the watchdog's thread neither; the stacks are printed, and the process is killed."""
    process = os.fork()
    if not process:
        log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 2)
        checkpointer = Checkpointer(tmp_path, save_timeout=1.0)
        # One call of C code, which keeps the interpreter's lock for minutes.
        checkpointer.save(1, {"nest": {"t": torch.ones(3)}}, files=lambda _: sum(range(10**11)))
        os._exit(0)
    _, status = os.waitpid(process, 0)
    log = (tmp_path / "log").read_text()
    assert os.waitstatus_to_exitcode(status) == -9
    assert "test_checkpoint_watchdog.py" in log
    assert "error: rank 0: a save or restore has missed its deadline (save_timeout)" in log
