"""Tables that scripts make: one JSON file each in docs/data, shown and filtered by docs/tables.md.

A file has a title, a sentence on how it was made, and rows that are objects with the same keys, one a line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stepmark.parallel.architectures import FILE

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "data"
Row = dict[str, Any]


def read_table(name: str) -> dict[str, Any]:
    """A table; an empty one if it does not exist yet."""
    path = FOLDER / f"{name}.json"
    found: dict[str, Any] = {"title": "", "made_by": "", "rows": []}
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else found


def read_rows(name: str) -> list[Row]:
    """The rows of a table; none if it does not exist yet."""
    rows: list[Row] = read_table(name)["rows"]
    return rows


def write_table(name: str, title: str, made_by: str, rows: list[Row]) -> None:
    """Replaces a table. Raises ValueError if a row has other keys than the first."""
    if any(row.keys() != rows[0].keys() for row in rows):
        raise ValueError(f"{name}: the rows do not have the same keys")
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    head = f'"title": {json.dumps(title)},\n"made_by": {json.dumps(made_by)},\n'
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(f'{{\n{head}"rows": [\n{lines}\n]\n}}\n', encoding="utf-8")


def write_lists(**lists: Any) -> None:
    """Replaces lists of the model types that `parallelize` accepts; see stepmark.parallel.architectures."""
    found = json.loads(FILE.read_text(encoding="utf-8"))
    FILE.write_text(json.dumps({**found, **lists}, indent=1) + "\n", encoding="utf-8")
