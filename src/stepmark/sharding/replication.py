"""How a parameter's slices are replicated along the tensor parallel axis and between pipeline stages.

It decides which gradients are summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepmark.sharding.layout import layout_of

if TYPE_CHECKING:
    from torch import Tensor

_ATTRIBUTE = "_stepmark_copies"


@dataclass(frozen=True)
class Replication:
    """`count` neighbours on the tensor parallel axis hold the same slice. `partial`: each of them has computed only a
    part of its gradient (from its own heads, or its part of the sequence), which is the sum of theirs; otherwise all of
    them have the complete gradient, and the same. `stages`: 2 for a table that the first pipeline stage uses as the
    embedding and the last one as the head; its gradient is the sum of theirs. `experts`: data parallel ranks hold
    different ones: see `Mesh.same`."""

    count: int
    partial: bool = False
    stages: int = 1
    experts: bool = False

    @property
    def copies(self) -> int:
        """The ranks of one data parallel coordinate that hold the same slice."""
        return self.count * self.stages


def annotate_replication(tensor: Tensor, replication: Replication) -> None:
    """Records how a live parameter is replicated."""
    setattr(tensor, _ATTRIBUTE, replication)


def replication_of(tensor: Tensor, axis_size: int) -> Replication:
    """What `annotate_replication` recorded; by default one replica if sharded, else `axis_size` of them."""
    replication = getattr(tensor, _ATTRIBUTE, None)
    return replication or Replication(axis_size if layout_of(tensor) is None else 1)
