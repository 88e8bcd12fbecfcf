"""What to say where a checkpoint of another tool is given instead of ours."""

from __future__ import annotations

from pathlib import Path

from stepmark.checkpoint.format.manifest import MANIFEST

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".distcp")
MAGIC = (b"PK\x03\x04", b"\x80\x02\x8a\x0a")  # files of torch.save, whatever their names
# Where the tools have their files, from the folder that a user may name.
_PLACES = "* sharded/* shards/* tensor_parallel_shards/* tp_rank_*/* model/* */model/* */shards/* global_step*/*"


def import_hint(path: Path, out: str) -> str | None:
    """The command that imports a folder or file, if it looks like a checkpoint of another tool; None otherwise.

    Names and a few bytes are read, never a pickle: `stepmark import` finds out which tool it is of.
    """
    try:
        found = [path] if path.is_file() else (each for pattern in _PLACES.split() for each in path.glob(pattern))
        looks = not (path / MANIFEST).is_file() and any(_has_tensors(each) for each in found if each.is_file())
    except OSError:
        return None
    if not looks:
        return None
    return f"it is a checkpoint of another tool: run `stepmark import {path} {out}`, and name what that writes"


def _has_tensors(path: Path) -> bool:
    if path.suffix in _SUFFIXES or path.name == ".metadata":
        return True
    with path.open("rb") as file:
        return file.read(4) in MAGIC
