"""Which files neuronx-distributed's ranks write, by name. A complete grid of ranks is required."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product, starmap
from pathlib import Path

from stepmark.errors import CheckpointDamaged
from stepmark.tensor_files.source_files import matching

_FILE = re.compile(
    r"(?:dp_rank_(?P<dp>\d+)|full)(?:_ep_rank_(?P<ep>\d+))?_tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)\.pt\Z"
)
# Of the first layout: tp_rank_00_pp_rank_00/checkpoint.pt, or xser without a folder; and optim.dp_rank_00.tp_rank_00
FIRST_LAYOUT = re.compile(r"tp_rank_(?P<tp>\d+)(?:_pp_rank_?(?P<pp>\d+))?(?:_dp_rank_\d+)?\Z")
FIRST_OPTIMIZERS = re.compile(r"optim\.dp_rank_(?P<dp>\d+)\.tp_rank_(?P<tp>\d+)\Z")
_LARGEST_RANK = 1 << 20


@dataclass(frozen=True)
class RankCoordinates:
    """A rank's coordinates. `dp` is -1 for a file that holds what all data parallel ranks have."""

    pp: int = 0
    tp: int = 0
    dp: int = 0
    ep: int = 0


def rank_files(folder: Path, pattern: re.Pattern[str] = _FILE) -> dict[RankCoordinates, Path]:
    """The files in a folder whose names match, by place; or `checkpoint.pt` in folders with such names. By default
    those of `model` or `optim` of a tag."""
    found = {}
    for match, path in matching(folder, pattern):
        file = path / "checkpoint.pt" if path.is_dir() else path
        numbers = {axis: int(number) for axis, number in match.groupdict().items() if number}
        of_all = {"dp": -1} if match[0].startswith("full") else {}
        if file.is_file():
            found[RankCoordinates(**of_all, **numbers)] = file
    return found


def check_grid(files: dict[RankCoordinates, Path], where: Path) -> dict[str, int]:
    """The mesh's sizes. Raises CheckpointDamaged where a rank's file is missing."""
    sizes = {axis: max(getattr(place, axis) for place in files) + 1 for axis in ("pp", "tp", "dp", "ep")}
    count = max(sizes["dp"], 1) * sizes["pp"] * sizes["tp"] * sizes["ep"]
    if count > _LARGEST_RANK or len(files) != count:
        pps, tps, dps, eps = (range(min(sizes[axis], len(files) + 1)) for axis in ("pp", "tp", "dp", "ep"))  # one lacks
        grid = product(pps, tps, dps if sizes["dp"] else (-1,), eps)
        place = next(place for place in starmap(RankCoordinates, grid) if place not in files)
        raise CheckpointDamaged(
            f"{where}: the file of pipeline rank {place.pp}, tensor rank {place.tp}, data rank {max(place.dp, 0)}"
            f"{f', expert rank {place.ep}' if sizes['ep'] > 1 else ''} is missing; the mesh is pp {sizes['pp']}, tp "
            f"{sizes['tp']}, dp {max(sizes['dp'], 1)}"
        )
    return sizes
