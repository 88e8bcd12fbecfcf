"""Files of torch.save, and of torch_xla's xser.

There `X.pt` has references in place of tensors, and tensor n is in `X.pt.tensors/tensor_n.pt`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepmark.errors import CheckpointDamaged
from stepmark.sharding.layout import Shape
from stepmark.tensor_files.global_tensor import StoredArray
from stepmark.tensor_files.pickle_reader import Global, PickledObject, dtype_of
from stepmark.tensor_files.records import Record
from stepmark.tensor_files.source_files import inside
from stepmark.tensor_files.torch_file import leaves, read_torch_file

_REFERENCES = (
    "torch_xla.utils.serialization.TensorReference",
    "neuronx_distributed.trainer.checkpoint._InternalTensorReference",
)


@dataclass(frozen=True)
class Missing:
    """A tensor that is referred to, and whose file is not there; with what the file of types says about it."""

    path: Path
    dtype: str | None
    shape: Shape | None


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
