"""`stepmark report RUN [--compare RUN2 …] [--serve]`"""

from __future__ import annotations

import argparse
from pathlib import Path

from stepmark.errors import UsageError

PORT = 8719
HELP = "write one HTML page about a run: curves, evaluations, checkpoints, timings"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's output_dir, running or finished")
    add = parser.add_argument
    add("--compare", metavar="RUN", type=Path, nargs="+", default=[], help="overlay the curves of these runs")
    add("--out", metavar="FILE", type=Path, help="file to write (default: RUN/report.html)")
    add("--csv", metavar="FOLDER", type=Path, help="also write all points of every figure as CSV files")
    add("--serve", action="store_true", help="serve the page on this machine, updated while the run continues")
    add("--port", type=int, metavar="N", help=f"port of --serve (default: {PORT}; 0: any free port)")


def run(parsed: argparse.Namespace) -> int:
    """Writes the page, prints its path, and returns 0; or serves it until Ctrl-C.

    Raises UsageError if a folder is not a run's output_dir, or options contradict each other.
    """
    if parsed.port is not None and not parsed.serve:
        raise UsageError("--port: is for --serve; give both, or leave it out")
    if parsed.serve and (parsed.out or parsed.csv):
        raise UsageError("--serve: writes no files; leave out --out and --csv, or call the command twice")
    if parsed.serve:
        from stepmark.report.serve import serve

        serve(parsed.run, parsed.compare, PORT if parsed.port is None else parsed.port)
        return 0
    from stepmark.report.write import write_report

    print(write_report(parsed.run, parsed.compare, parsed.out, parsed.csv))
    return 0
