"""The entry point of `stepmark` and `python -m stepmark`."""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:  # as `python -P`: the current folder's modules are not ours
    del sys.path[0]

import contextlib
import io
import os
from collections.abc import Sequence
from typing import Any


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command, and ends the process with its exit code; quietly with 1 if its output is closed early."""
    for number in range(3):  # else a file would get the number of a closed stream, which libraries print to
        with contextlib.suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)
    from stepmark.launch import signal_handlers

    signal_handlers.postpone_keyboard_interrupts()  # before further imports
    signal_handlers.keep_exit_code()
    try:
        code = _run(sys.argv[1:] if arguments is None else arguments)
    finally:
        signal_handlers.ignore_until_exit()  # they come too late to change anything
    if code == 1:
        from stepmark.liveness.process_exit import end_rank

        end_rank(code)
    sys.exit(code)


def _run(arguments: Sequence[str]) -> int:
    from stepmark.cli.main import run

    _ignore_closed_stderr()
    try:
        try:
            return run(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # as with `| head`
        # What is left in stdout's buffer goes nowhere, so that the interpreter does not fail to flush it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class _ForgivingFile(io.FileIO):
    """Standard error, whose writes succeed without effect once its reader is gone (`2>&1 | head`): no end of a run."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except BrokenPipeError:
            return len(memoryview(content).cast("B"))


def _ignore_closed_stderr() -> None:
    with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or not a file
        raw = _ForgivingFile(sys.stderr.fileno(), "w", closefd=False)
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding=sys.stderr.encoding, errors="backslashreplace", line_buffering=True
        )


if __name__ == "__main__":
    main()
