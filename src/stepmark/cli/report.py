"""`stepmark report FOLDER… [--serve]`"""

from __future__ import annotations

import argparse
from pathlib import Path

from stepmark.errors import UsageError

PORT = 8719
HELP = "write one HTML page about runs: curves, evaluations, checkpoints, timings"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folders", metavar="FOLDER", type=Path, nargs="+", help="a run's output_dir, or a folder that contains runs")
    add("--compare", metavar="FOLDER", type=Path, nargs="+", default=[], help="the same as further folders")
    add("--out", metavar="FILE", type=Path, help="file to write (default: report.html in the first folder)")
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
    first, *more = folders = [*parsed.folders, *parsed.compare]
    if parsed.serve:
        from stepmark.report.serve import serve

        serve(folders, PORT if parsed.port is None else parsed.port)
        return 0
    from stepmark.report.page import write_report

    print(write_report(first, more, parsed.out, parsed.csv))
    return 0
