"""Ends this process when it has missed a deadline and none of its Python threads can run.

When something holds the interpreter's lock, no thread can act, so a small helper process
(`external_watchdog_process.py`) counts down. A system timer, or faulthandler's thread, would also count the time in
which the job is suspended, and end it when it wakes.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from stepmark.liveness.failure_report import REPORTS
from stepmark.liveness.process_exit import STDERR

SCRIPT = Path(__file__).with_name("external_watchdog_process.py")
STACKS = int(getattr(signal, "SIGRTMAX", signal.SIGUSR2)) - 1  # the signal at which this process prints its stacks
SAVE, BEAT = "save", "beat"  # the countdowns of saves and restores, and of heartbeats
CLOSING = 1.0  # seconds
LONGEST = 1000  # characters: a line is written atomically

logger = logging.getLogger("stepmark")


class ExternalWatchdog:
    """Countdowns in a helper process, which is started with the first of them."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._disabled = False

    def count_down(
        self,
        name: str,
        prints: float | None,
        ends: float | None,
        doing: str = "",
        record: tuple[str, dict[str, Any]] | None = None,
    ) -> None:
        """Prints the stacks of this process after `prints` seconds of running time and ends it after `ends` seconds,
        unless it is called again with the same name before that; None: never. `doing` says where the process is;
        `record` is the path of the status file, and its content without the reason."""
        if self._process is None and not self._disabled and (prints, ends) != (None, None):
            self._start()
        if self._process is None or self._process.stdin is None:
            return
        try:
            line = json.dumps([name, prints, ends, doing[:LONGEST], record])
            self._process.stdin.write(f"{line}\n".encode())
        except (OSError, ValueError):  # the helper was ended
            self.close()

    def _start(self) -> None:
        rank, reports = os.environ.get("RANK", "0"), os.environ.get(REPORTS, "")
        command = [sys.executable, "-I", "-S", str(SCRIPT), str(os.getpid()), str(STACKS), rank, reports]
        try:
            faulthandler.register(STACKS, file=STDERR, all_threads=True, chain=False)
            # In its own session, so that it is not stopped or interrupted together with a terminal's foreground job.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0, start_new_session=True
            )
        except (OSError, RuntimeError, ValueError) as error:
            self._disabled = True
            logger.debug("no process ends this one if the interpreter is stuck: %s", error)
        else:
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)  # it may be stopped
            atexit.register(self.close)

    def close(self) -> None:
        """Ends the helper."""
        process = self._let_go()
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(CLOSING)

    def forget(self) -> None:
        """In a forked process: the helper belongs to the parent."""
        process = self._let_go()
        if process is not None:
            process.returncode = 0  # not a child of this process, so there is nothing to wait for

    def _let_go(self) -> subprocess.Popen[bytes] | None:
        """Closes the helper's input, at whose end it exits unless another process has it open."""
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return None
        atexit.unregister(self.close)
        with contextlib.suppress(OSError, ValueError):
            process.stdin.close()
        return process
