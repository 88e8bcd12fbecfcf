"""What to say where a checkpoint of another tool is given instead of ours."""

from __future__ import annotations

from pathlib import Path


def import_hint(path: Path, out: str) -> str | None:
    """The command that imports a folder, if it is a checkpoint of another tool; None where it is not.

    Only names and a few bytes are read, never a pickle.
    """
    from stepmark.interchange.recognition import format_of

    if not path.exists():
        return None
    found = format_of(path)
    if found is None:
        return None
    return f"it is a checkpoint of another tool: run `stepmark import {path} {out}`, and name what that writes"
