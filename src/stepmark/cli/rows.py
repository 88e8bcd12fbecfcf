"""`stepmark rows RUN --step N`"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from stepmark.errors import UsageError
from stepmark.filesystem.local_paths import RECORDS
from stepmark.filesystem.printable import printable

TAKES = {"run": RECORDS}
HELP = "print the samples that a run has trained in a step"
SHOWN = 200  # characters of a text
ORIGINS = 5  # of a sample


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="a run's output_dir")
    add("--step", metavar="N[-M]", required=True, help="a step, or the first and last of several")
    add("--rank", metavar="N", type=int, help="only this rank's samples")
    attempt = "as resumption N has trained them; 0: as before any (default: the last)"
    add("--attempt", metavar="N", type=int, help=attempt)
    add("--trust_remote_code", action="store_true", help="execute Python code that came with the tokenizer")
    add("--json", action="store_true", help="print JSON, with complete texts")


def run(parsed: argparse.Namespace) -> int:
    """Prints the samples, and on stderr what is not known of them; returns 0.

    Raises UsageError where the run has no such step or rank, or has not recorded the order of its samples.
    """
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", parsed.step)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise UsageError(f"--step: should be a step from 1, or a range such as 1200-1203, and is {parsed.step}")
    from stepmark.config.quiet_libraries import quiet_libraries
    from stepmark.recipe.trained_rows import RunRows
    from stepmark.report.history import read_history

    quiet_libraries()
    trained = read_history(parsed.run, recent=True).last_step or 0
    rows = RunRows(parsed.run, parsed.attempt, trusts_code=parsed.trust_remote_code)
    found = rows.of_steps(range(first, last + 1), parsed.rank)
    if parsed.json:
        print(json.dumps({"missing": rows.missing, "rows": found}, indent=2))
    else:
        print("\n".join(map(_line, found)))
    if rows.missing is not None:
        print(printable(rows.missing), file=sys.stderr)
    if last > trained:
        later = "later ones train these samples if nothing changes"
        print(f"the last step on record is {trained}; {later}", file=sys.stderr)
    return 0


def _line(row: dict[str, Any]) -> str:
    ranks, origin = ", ".join(map(str, row["ranks"])), row.get("origin", [])
    line = f"step {row['step']}, epoch {row['epoch']}, rank {ranks}, micro-batch {row['micro_batch']}: "
    line += f"sample {row['sample']}" + (f" of source {row['source']}" if row.get("source") else "")
    if origin:
        more = f" and {len(origin) - ORIGINS} more" if len(origin) > ORIGINS else ""
        line += f" ({'; '.join(origin[:ORIGINS])}{more})"
    return f"{line}\n  {' '.join(row['text'].split())[:SHOWN]}" if "text" in row else line
