"""The helper process of `watchdog.py`: ends its parent after a countdown. It imports nothing of this package.

Arguments: the parent's process id, the signal that makes the parent print its stacks, the rank, and the folder for
failure reports (empty: standard error). Each line on standard input is a countdown in JSON: its name, the seconds after
which the parent prints its stacks and after which it is killed (null: never), what the parent is doing, and the path
and content of the run's status file (null for none).
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
PRINTING = 0.5  # seconds for the parent to print its stacks
PATIENCE = 3.0  # seconds that SIGTERM may wait for a parent that is stopped
SAVE = "save"
REASON = (
    "a save or restore has missed its deadline (save_timeout), and the process did not react to it: something holds "
    "the interpreter's lock"
)
STUCK = "no thread of the process has run for {:.0f} s: something holds the interpreter's lock"


class Countdown:
    """See the module; `prints` and `ends` in seconds from now."""

    def __init__(self, name: str, prints: float | None, ends: float | None, doing: str, record: list | None) -> None:
        self.name, self.prints, self.ends, self.doing, self.record = name, prints, ends, doing, record
        self.passed = 0.0

    @property
    def reason(self) -> str:
        return REASON if self.name == SAVE else f"stuck: {self.doing}: {STUCK.format(self.passed)}"


def main(parent: int, stacks: int, rank: int, reports: str) -> None:
    """Counts down until standard input is closed or the parent is gone. Only time in which both processes are running
    counts. A stopped parent that its launcher has asked to exit is killed, since it would keep the job from ending."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent handles them
    countdowns: dict[str, Countdown] = {}
    looked, asked = time.monotonic(), 0.0
    launched = not reports and os.environ.get("WORLD_SIZE", "1") != "1"  # by another launcher than ours
    while os.getppid() == parent:
        lines = _read_lines()
        if lines is None:
            return
        now = time.monotonic()
        passed, looked = min(now - looked, 2 * LOOK_SECONDS), now
        renewed = {each.name: each for each in (Countdown(*json.loads(line)) for line in lines)}
        stopped, waits = _state(parent)
        asked = asked + passed if waits else 0.0
        if launched and asked > PATIENCE:  # torchrun would wait for 30 s
            with contextlib.suppress(OSError):
                os.write(2, f"stepmark: rank {rank} is stopped, and was asked to end: it is killed\n".encode())
            os.kill(parent, signal.SIGKILL)
            return
        running = bool(countdowns) and not stopped
        for each in [each for name, each in countdowns.items() if running and name not in renewed]:
            each.passed += passed
            if each.ends is not None and each.passed >= each.ends:
                _end(parent, stacks, rank, reports, each)
                return
            if each.prints is not None and each.passed >= each.prints:
                each.prints = None
                _print_stacks(parent, stacks, each.reason)
        countdowns |= renewed


def _read_lines() -> list[bytes] | None:
    """The lines that arrive within LOOK_SECONDS; None once the input is closed. The parent writes each line at once."""
    if not select.select([0], [], [], LOOK_SECONDS)[0]:
        return []
    return os.read(0, 65536).splitlines() or None


def _state(process: int) -> tuple[bool, bool]:
    """Whether a process is stopped, by SIGSTOP or a debugger, and whether a SIGTERM is pending; False if unknown."""
    try:
        with open(f"/proc/{process}/status") as file:
            lines = dict(line.split(":\t", 1) for line in file)
        stopped = lines["State"][0] in "Tt"
        return stopped, stopped and bool(int(lines["ShdPnd"], 16) >> (signal.SIGTERM - 1) & 1)
    except (OSError, KeyError, ValueError):
        return False, False


def _print_stacks(parent: int, stacks: int, reason: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"stepmark: {reason}; the stacks of all threads:\n".encode())
    os.kill(parent, stacks)


def _end(parent: int, stacks: int, rank: int, reports: str, missed: Countdown) -> None:
    _print_stacks(parent, stacks, missed.reason)
    time.sleep(PRINTING)
    reason = f"{missed.reason}; the stacks of all threads are printed above"
    with contextlib.suppress(OSError):  # the process ends all the same
        if missed.record is not None:
            path, content = missed.record
            _replace(path, {**content, "reason": reason, "time": time.time()})
    with contextlib.suppress(OSError):
        if reports:
            report = {"rank": rank, "message": reason, "details": "", "exit_code": 1, "secondary": False}
            _replace(os.path.join(reports, f"rank-{rank}.json"), {**report, "time": time.time()})
        else:
            os.write(2, f"error: rank {rank}: {reason}\n".encode())
    os.kill(parent, signal.SIGKILL)


def _replace(target: str, content: dict) -> None:
    """Writes the file atomically, like FailureReport.leave."""
    part = os.path.join(os.path.dirname(target), f".stepmark-{os.urandom(16).hex()}")
    with open(part, "x") as file:
        json.dump(content, file)
    os.rename(part, target)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
