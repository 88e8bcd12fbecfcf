"""`stepmark` and `python -m stepmark`."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command, and ends the process with its exit code."""
    from stepmark.cli.main import run
    from stepmark.launch.process_exit import end_rank

    code = run(sys.argv[1:] if arguments is None else arguments)
    if code == 1:
        end_rank(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
