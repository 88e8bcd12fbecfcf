"""`stepmark report RUN [--compare RUN2 …]`"""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "write one HTML page about a run: curves, evaluations, checkpoints, timings"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's output_dir, running or finished")
    parser.add_argument(
        "--compare", metavar="RUN", type=Path, nargs="+", default=[], help="draw the curves of these runs over its own"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="where to write the page (default: RUN/report.html)")


def run(parsed: argparse.Namespace) -> int:
    """Writes the page, prints its path, and returns 0. Raises UsageError if a folder is not a run's output_dir."""
    from stepmark.report.write import write_report

    print(write_report(parsed.run, parsed.compare, parsed.out))
    return 0
