"""Where a benchmark ran, and the history of its results: results/NAME.csv, a line for each number.

Columns: the date, the commit that was measured (with a star if files differed from it; of rows from before 2026-11-25,
the commit that recorded them), the machine, the setting, the contestant, the measure and its value.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
COLUMNS = ("date", "commit", "machine", "setting", "contestant", "measure", "value")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?%?")
VERDICT = re.compile(r"(?:- )?(?:(?:holds|missed): )?", re.IGNORECASE)  # what a line begins with
LINE = re.compile(r"(?P<measure>[^|]+): (?P<value>-?\d[^:]*)")
DATE = re.compile(r",? ?(\d{4}-\d\d-\d\d)")
Number = tuple[str, str, str, str]  # what is said above its table, contestant, measure, value


def machine() -> str:
    """One line: versions, processor, the load that was there already, date."""
    import torch

    load = os.getloadavg()[0]
    return (
        f"torch {torch.__version__}, {os.cpu_count()} cores {platform.machine()}, load {load:.1f} at the end, "
        f"{time.strftime('%Y-%m-%d')}"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `on_ranks` reads, besides the number of ranks."""
    parser.add_argument("--save", action="store_true", help="append the numbers to those in results/")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)  # where rank 0 writes its text


def on_ranks(
    name: str,
    setting: str,
    options: argparse.Namespace,
    rank_main: Callable[[argparse.Namespace], None],
    start: Callable[[Sequence[str]], int] | None = None,
) -> int:
    """Starts the program again as `options.nproc` ranks, where `rank_main` writes a text to `options.out`. Prints it,
    and keeps its numbers where that is asked for. Returns the exit code. `start`: starts the ranks of a command."""
    if "RANK" in os.environ:
        rank_main(options)
        return 0
    from stepmark.launch.supervisor import supervise

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "table.md"
        command = [sys.executable, *sys.argv, "--out", str(out)]
        code = supervise(command, options.nproc) if start is None else start(command)
        if code == 0:
            print(out.read_text(), end="")
            if options.save:
                keep(name, setting, out.read_text())
    return code


def keep(name: str, setting: str, text: str) -> None:
    """Appends the numbers of a benchmark's printed text to its history, of which `setting` tells the run's options."""
    where = next((line for line in text.splitlines() if " cores " in line), machine())
    append(name, setting, text, where=where, commit=revision())


def append(name: str, setting: str, text: str, *, where: str, commit: str) -> None:
    """As `keep`, with the machine's line, which contains the date, and the commit."""
    path = RESULTS / f"{name}.csv"
    begins = not path.exists()
    found = DATE.search(where)
    head = (found[1] if found else time.strftime("%Y-%m-%d"), commit, DATE.sub("", where).split(". ")[0].strip(" ,."))
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if begins:
            writer.writerow(COLUMNS)
        for above, *number in numbers(text):
            writer.writerow((*head, ", ".join(filter(None, (setting, above))), *number))


def numbers(text: str) -> Iterator[Number]:
    """The cells of the text's tables, and its lines of the form `measure: value`.

    Cells before the first number of a row name the contestant; a heading of the second level belongs to the setting.
    """
    above, columns = "", None
    for line in text.splitlines():
        if line.startswith("## "):
            above = line.removeprefix("## ")
        if not line.startswith("|"):
            columns = None
            said = None if line.startswith("#") else LINE.fullmatch(VERDICT.sub("", line, count=1))
            if said:
                yield above, "", said["measure"].strip(), said["value"]
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if columns is None:
            columns = cells
        elif not set(line) <= set("|-: "):
            first = next((index for index, cell in enumerate(cells) if NUMBER.fullmatch(cell)), len(cells))
            contestant = ", ".join(filter(None, cells[:first]))
            pairs = zip(columns[first:], cells[first:], strict=True)
            yield from ((above, contestant, column, cell) for column, cell in pairs if cell)


def revision() -> str:
    """The commit that is measured, with a star if files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=RESULTS, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", ":/src", ":/benchmarks/*.py")
    return git("rev-parse", "--short", "HEAD") + ("*" if changed else "")
