"""Prints the lines of src/stepmark by room, and fails when all of them together are above the ceiling."""

from __future__ import annotations

import sys
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "stepmark"
CEILING = 63_400


def lines_of(folder: Path) -> dict[str, int]:
    """Lines of Python by room: a package of the source folder, or `root` for the modules directly in it."""
    counted: dict[str, int] = {}
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder).parts
        room = inside[0] if len(inside) > 1 else "root"
        counted[room] = counted.get(room, 0) + len(path.read_text(encoding="utf-8").splitlines())
    return counted


def excess(counted: dict[str, int], ceiling: int = CEILING) -> int:
    """By how many lines all rooms together exceed the ceiling."""
    return max(0, sum(counted.values()) - ceiling)


def main() -> None:
    counted = lines_of(SOURCE)
    for room, lines in sorted(counted.items(), key=lambda row: -row[1]):
        print(f"{lines:7,} {room}")
    print(f"{sum(counted.values()):7,} in all, of {CEILING:,}")
    if over := excess(counted):
        sys.exit(f"{over} lines above the ceiling: remove as many, or raise it in {Path(__file__).name} and say why")


if __name__ == "__main__":
    main()
