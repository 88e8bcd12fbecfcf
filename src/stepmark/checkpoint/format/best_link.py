"""`best`: a link beside the checkpoints to the best of them, which is never deleted."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from stepmark.checkpoint.format.checkpoint_folders import checkpoint_path, step_of
from stepmark.filesystem import files

BEST = "best"


def best_step(folder: Path) -> int | None:
    """The step that `best` points at; None where there is no such link."""
    try:
        return step_of(Path(os.readlink(folder / BEST)))
    except OSError:
        return None


def point_best(folder: Path, step: int) -> None:
    """Lets `best` point at this step's checkpoint, in one step and relative to the folder.

    Raises FileExistsError where something else has that name.
    """
    link = folder / BEST
    if link.exists() and not link.is_symlink():
        raise FileExistsError(17, "is in the way of the link to the best checkpoint", str(link))
    temporary = folder / f".{BEST}.{secrets.token_hex(6)}"
    os.symlink(checkpoint_path(folder, step).name, temporary)
    files.rename(temporary, link)
