"""The entry point of `stepmark` and `python -m stepmark`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command, and ends the process with its exit code; quietly with 1 if its output is closed early."""
    from stepmark.cli.main import run
    from stepmark.launch.process_exit import end_rank

    try:
        try:
            code = run(sys.argv[1:] if arguments is None else arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # as with `| head`
        _discard_output()
        code = 1
    if code == 1:
        end_rank(code)
    sys.exit(code)


def _discard_output() -> None:
    """Sends what is left in stdout's buffer to nowhere, so that the interpreter does not fail to flush it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
