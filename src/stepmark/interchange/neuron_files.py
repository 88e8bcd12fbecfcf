"""The files that neuronx-distributed's ranks write: which there are, and their contents with tensors resolved.

Plain files are torch.save of the state. With xser, `X.pt` has references in place of tensors, and tensor n is in
`X.pt.tensors/tensor_n.pt`. Sizes of the mesh follow from the names alone; a complete grid of ranks is required.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepmark.errors import CheckpointDamaged
from stepmark.interchange.pickle_reader import Global, PickledObject, dtype_of
from stepmark.interchange.records import Record
from stepmark.interchange.source_files import inside
from stepmark.interchange.stored_array import StoredArray
from stepmark.interchange.torch_file import leaves, read_torch_file
from stepmark.sharding.layout import Shape

_FILE = re.compile(
    r"(?:dp_rank_(?P<dp>\d+)|(?P<full>full))(?:_ep_rank_(?P<ep>\d+))?_tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)\.pt\Z"
)
_FOLDER = re.compile(r"tp_rank_(?P<tp>\d+)(?:_pp_rank_?(?P<pp>\d+))?(?:_dp_rank_\d+)?\Z")
_FIRST_OPTIMIZER = re.compile(r"optim\.dp_rank_(?P<dp>\d+)\.tp_rank_(?P<tp>\d+)\Z")
_REFERENCES = (
    "torch_xla.utils.serialization.TensorReference",
    "neuronx_distributed.trainer.checkpoint._InternalTensorReference",
)
_LARGEST_RANK = 1 << 20


@dataclass(frozen=True)
class Place:
    """A rank's coordinates. `dp` is -1 for a file that holds what all data parallel ranks have."""

    pp: int
    tp: int
    dp: int = 0
    ep: int = 0


@dataclass(frozen=True)
class Missing:
    """A tensor that is referred to, and whose file is not there; with what the file of types says about it."""

    path: Path
    dtype: str | None
    shape: Shape | None


def rank_files(folder: Path) -> dict[Place, Path]:
    """The files of a folder `model` or `optim`, by place."""
    found = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _FILE.match(path.name)
        if match is not None and path.is_file():
            dp = -1 if match["full"] else int(match["dp"])
            found[Place(int(match["pp"]), int(match["tp"]), dp, int(match["ep"] or 0))] = path
    return found


def first_layout_files(folder: Path) -> dict[Place, Path]:
    """The model files of the first layout: `tp_rank_00_pp_rank_00/checkpoint.pt`, or xser without a folder."""
    found = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _FOLDER.match(path.name)
        if match is None:
            continue
        file = path / "checkpoint.pt" if path.is_dir() else path
        if file.is_file():
            found[Place(int(match["pp"] or 0), int(match["tp"]))] = file
    return found


def first_layout_optimizers(folder: Path) -> dict[Place, Path]:
    """The optimizer files `optim.dp_rank_00.tp_rank_00` of the first layout."""
    found = {}
    for path in sorted(folder.iterdir()):
        match = _FIRST_OPTIMIZER.match(path.name)
        if match is not None and path.is_file():
            found[Place(0, int(match["tp"]), int(match["dp"]))] = path
    return found


def check_grid(files: dict[Place, Path], where: Path) -> dict[str, int]:
    """The mesh's sizes. Raises CheckpointDamaged where a rank's file is missing."""
    sizes = {axis: max(getattr(place, axis) for place in files) + 1 for axis in ("pp", "tp", "dp", "ep")}
    count = max(sizes["dp"], 1) * sizes["pp"] * sizes["tp"] * sizes["ep"]
    if count > _LARGEST_RANK or len(files) != count:
        place = next(place for place in _grid(sizes) if place not in files)
        raise CheckpointDamaged(
            f"{where}: the file of pipeline rank {place.pp}, tensor rank {place.tp}, data rank {max(place.dp, 0)}"
            f"{f', expert rank {place.ep}' if sizes['ep'] > 1 else ''} is missing; the mesh is pp {sizes['pp']}, tp "
            f"{sizes['tp']}, dp {max(sizes['dp'], 1)}"
        )
    return sizes


def _grid(sizes: dict[str, int]) -> Iterator[Place]:
    dps = range(sizes["dp"]) if sizes["dp"] else (-1,)
    return (
        Place(pp, tp, dp, ep)
        for pp in range(sizes["pp"])
        for tp in range(sizes["tp"])
        for dp in dps
        for ep in range(sizes["ep"])
    )


def read_rank_file(path: Path, records: list[Record], other: Path | None = None) -> Any:
    """The contents of a rank's file, with StoredArrays, or Missing, in place of references.

    `other` is the file of the first expert parallel rank, which has the tensors that are no experts.
    """
    file = read_torch_file(path)
    records += file.records
    return _Resolver(path, records, other).resolve(file.value)


def read_saved(path: Path, records: list[Record]) -> Any:
    """The contents of a file of torch.save, or of torch_xla's xser: then with the tensors in the files beside it.

    Raises CheckpointDamaged, naming the file, where one of them is missing.
    """
    found = read_rank_file(path, records)
    missing = next(leaves(found, Missing), None)
    if missing is not None:
        raise CheckpointDamaged(f"{missing.path} is missing; it holds a tensor of {path.name}")
    return found


class _Resolver:
    def __init__(self, path: Path, records: list[Record], other: Path | None) -> None:
        self._path = path
        self._records = records
        self._other = other
        self._info: dict[Any, Any] | None = None

    def resolve(self, value: Any) -> Any:
        if isinstance(value, PickledObject) and value.kind in _REFERENCES:
            return self._tensor(value.get("tid"))
        if isinstance(value, dict):
            return {key: self.resolve(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.resolve(item) for item in value]
        return value

    def _tensor(self, number: Any) -> StoredArray | Missing:
        if type(number) is not int or number < 0:
            raise CheckpointDamaged(f"{self._path} refers to a tensor without a number")
        for file in (self._path, self._other):
            if file is None:
                continue
            path = inside(file.parent, f"{file.name}.tensors/tensor_{number}.pt", self._path)
            if path.is_file():
                found = read_torch_file(path)
                self._records += found.records
                if not isinstance(found.value, StoredArray):
                    raise CheckpointDamaged(f"{path} does not hold a tensor")
                return found.value
        path = self._path.with_name(f"{self._path.name}.tensors") / f"tensor_{number}.pt"
        return Missing(path, *self._described(number))

    def _described(self, number: int) -> tuple[str | None, Shape | None]:
        """The type and shape of a tensor that is not there."""
        if self._info is None:
            path = self._path.with_name(f"{self._path.name}.info.pt")
            value = read_torch_file(path).value if path.is_file() else {}
            self._info = value if isinstance(value, dict) else {}
        entry = self._info.get(number)
        dtype, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
        sizes = tuple(shape) if isinstance(shape, list | tuple) and all(type(size) is int for size in shape) else None
        return dtype_of(dtype.name) if isinstance(dtype, Global) else None, sizes
