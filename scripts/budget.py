"""Counts the lines of src/stepmark by room against scripts/budget.toml, and fails above a budget.

A budget that a change needs to exceed is raised in the same commit, whose message says what the lines buy; one that is
far above what its room has is lowered, so that lines which were removed stay removed.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "stepmark"
TABLE = Path(__file__).with_suffix(".toml")
SLACK = 40  # lines by which a budget may exceed its room before it must be lowered


def lines_of(folder: Path) -> dict[str, int]:
    """Lines of Python by room: a package of the source folder, or `root` for the modules directly in it."""
    counted: dict[str, int] = {}
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder).parts
        room = inside[0] if len(inside) > 1 else "root"
        counted[room] = counted.get(room, 0) + len(path.read_text(encoding="utf-8").splitlines())
    return counted


def problems(counted: dict[str, int], budget: dict[str, int]) -> list[str]:
    """What the table and the source disagree on, a line each."""
    found = []
    for room, lines in counted.items():
        if room not in budget:
            found.append(f"{room}: {lines} lines, and no budget; add it to {TABLE.name}")
        elif lines > budget[room]:
            found.append(f"{room}: {lines} lines, {lines - budget[room]} above its budget of {budget[room]}")
        elif lines < budget[room] - SLACK:
            found.append(f"{room}: {lines} lines; lower its budget of {budget[room]}")
    return found + [f"{room}: a budget, but no such room" for room in budget if room not in counted]


def main() -> None:
    """Prints the rooms, or with --write sets every budget to what its room has now."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="set every budget to the present number of lines")
    write = parser.parse_args().write
    counted = lines_of(SOURCE)
    if write:
        rows = "".join(f"{room} = {lines}\n" for room, lines in counted.items())
        TABLE.write_text(f"# Lines of Python by room; see budget.py.\n[rooms]\n{rows}", encoding="utf-8")
    budget: dict[str, int] = tomllib.loads(TABLE.read_text(encoding="utf-8"))["rooms"]
    found = problems(counted, budget)
    print(f"{sum(counted.values())} lines of {sum(budget.values())} in {len(counted)} rooms")
    if found:
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
