"""The process of `external_watchdog.py`, a script that imports nothing of ours: ends its parent after a countdown.

Arguments: the parent's process id, the signal at which the parent prints its stacks, the rank, and the folder for
failure reports (empty: standard error). Each line on standard input is a new countdown in seconds, or `-` for none.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time

LOOK_SECONDS = 0.25
PRINTING = 0.5  # seconds that the parent has to print its stacks
REASON = (
    "a save or restore has missed its deadline (save_timeout), and the process did not react to it: something holds "
    "the interpreter's lock; the stacks of all threads are printed above"
)


def main(parent: int, stacks: int, rank: int, reports: str) -> None:
    """Counts down until standard input is closed or the parent is gone. Only time in which both this process and the
    parent are running counts."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are the parent's to handle
    left: float | None = None
    looked = time.monotonic()
    while os.getppid() == parent:
        lines = _read_lines()
        if lines is None:
            return
        now = time.monotonic()
        passed, looked = min(now - looked, 2 * LOOK_SECONDS), now
        if lines:
            left = None if lines[-1] == b"-" else float(lines[-1])
        elif left is not None and not _is_stopped(parent):
            left -= passed
        if left is not None and left <= 0:
            _end(parent, stacks, rank, reports)
            return


def _read_lines() -> list[bytes] | None:
    """What has arrived within a moment; None if the input is closed. The parent writes each line in one piece."""
    if not select.select([0], [], [], LOOK_SECONDS)[0]:
        return []
    return os.read(0, 65536).split() or None


def _is_stopped(process: int) -> bool:
    """Whether a process is stopped, by SIGSTOP or a debugger; False where that cannot be told."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False


def _end(parent: int, stacks: int, rank: int, reports: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"stepmark: {REASON}\n".encode().replace(b"printed above", b"printed below"))
    os.kill(parent, stacks)
    time.sleep(PRINTING)
    try:
        if reports:
            _leave_report(rank, reports)
        else:
            os.write(2, f"error: rank {rank}: {REASON}\n".encode())
    except OSError:
        pass  # the process ends all the same
    os.kill(parent, signal.SIGKILL)


def _leave_report(rank: int, reports: str) -> None:
    """As FailureReport.leave does."""
    report = {"rank": rank, "message": REASON, "details": "", "exit_code": 1, "secondary": False, "time": time.time()}
    target = os.path.join(reports, f"rank-{rank}.json")
    with open(f"{target}.part", "w") as file:
        json.dump(report, file)
    os.rename(f"{target}.part", target)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
