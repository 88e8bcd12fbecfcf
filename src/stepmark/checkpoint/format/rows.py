"""One slice of a tensor as a save plans it, and a key of optimizer states. Needs no torch."""

from __future__ import annotations

from typing import NamedTuple

from stepmark.checkpoint.format.dtypes import item_size
from stepmark.sharding.layout import Shape, TensorSlice

ANY_ONE = 2
MASTER = "master"  # the key of an optimizer's own copy of a parameter, in fp32


class Row(NamedTuple):
    """A slice that a rank holds. `group` is the file it goes to, without number and suffix: model, state/loader.

    `first`: of the ranks that hold the same slice, the first writes all of it, since the others' values may differ;
    with ANY_ONE, the one that writes least.
    """

    group: str
    name: str
    dtype: str
    shape: Shape
    slice: TensorSlice
    first: int = False

    @property
    def nbytes(self) -> int:
        return self.slice.numel * item_size(self.dtype)
