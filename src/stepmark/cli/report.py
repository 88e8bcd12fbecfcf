"""`stepmark report FOLDER…`"""

from __future__ import annotations

import argparse
from pathlib import Path

from stepmark.filesystem.local_paths import RECORDS

TAKES = {"folders": RECORDS, "compare": RECORDS}
HELP = "write one HTML page about runs: curves, evaluations, checkpoints, timings"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folders", metavar="FOLDER", type=Path, nargs="+", help="a run's output_dir, or a folder that contains runs")
    add("--compare", metavar="FOLDER", type=Path, nargs="+", default=[], help="the same as further folders")
    page = "file to write (default: report.html in the first folder; here for an address)"
    add("--out", metavar="FILE", type=Path, help=page)
    add("--csv", metavar="FOLDER", type=Path, help="also write all points of every figure as CSV files")


def run(parsed: argparse.Namespace) -> int:
    """Writes the page, prints its path, and returns 0. Raises UsageError if a folder is not a run's output_dir."""
    from stepmark.filesystem.cache_folder import fetched_root
    from stepmark.report.page import PAGE, write_report

    if parsed.out is None and parsed.folders[0].is_relative_to(fetched_root()):
        parsed.out = Path(PAGE)
    folders = [*parsed.folders, *parsed.compare]
    print(write_report(folders[0], folders[1:], parsed.out, parsed.csv))
    return 0
