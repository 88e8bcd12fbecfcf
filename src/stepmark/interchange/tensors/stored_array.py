"""Arrays that lie in files of other tools: where their elements are, without reading them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stepmark.checkpoint.format.dtypes import item_size
from stepmark.sharding.layout import Shape


@dataclass(frozen=True)
class StoredArray:
    """A strided array in a file, or, with `data`, in memory (a number that a pickle holds, for example).

    Element (0, ..., 0) begins at byte `offset` of the file; `strides` count elements and are not negative. `dtype` is a
    name of safetensors.
    """

    path: Path
    offset: int
    dtype: str
    shape: Shape
    strides: Shape
    data: bytes | None = None

    @classmethod
    def contiguous(cls, path: Path, offset: int, dtype: str, shape: Sequence[int]) -> StoredArray:
        """An array in row-major order."""
        return cls(path, offset, dtype, tuple(shape), row_major_strides(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def narrow(self, dim: int, start: int, length: int, step: int = 1) -> StoredArray:
        """Every `step`-th of the elements from `start` on along a dim, `length` of them."""
        assert start >= 0
        assert start + (length - 1) * step < max(self.shape[dim], 1)
        offset = self.offset + start * self.strides[dim] * item_size(self.dtype)
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        strides = (*self.strides[:dim], self.strides[dim] * step, *self.strides[dim + 1 :])
        return replace(self, offset=offset, shape=shape, strides=strides)

    def flat(self, start: int, length: int) -> StoredArray:
        """Elements [start, start + length) of an array in row-major order."""
        offset = self.offset + start * item_size(self.dtype)
        return replace(self, offset=offset, shape=(length,), strides=(1,))

    def span(self) -> int:
        """Bytes from the first element to the end of the last."""
        if not self.numel:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * item_size(self.dtype)


def row_major_strides(shape: Sequence[int]) -> Shape:
    """The strides, in elements, of an array in row-major order."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
