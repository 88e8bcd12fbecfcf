"""`stepmark report RUN [--compare RUN2 …]`"""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "write one HTML page about a run: curves, evaluations, checkpoints, timings"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's folder, in progress or ended")
    parser.add_argument(
        "--compare", metavar="RUN", type=Path, nargs="+", default=[], help="draw the curves of these runs over its own"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="where the page goes (default: RUN/report.html)")
    parser.add_argument("--png", action="store_true", help="write every figure as a picture beside it too")


def run(parsed: argparse.Namespace) -> int:
    """Writes it and prints the paths; 0. Raises UsageError for a folder that is not that of a run."""
    from stepmark.report.write import write_report

    for path in write_report(parsed.run, parsed.compare, parsed.out, png=parsed.png):
        print(path)
    return 0
