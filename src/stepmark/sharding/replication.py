"""Which ranks of the tensor parallel axis hold the same slice of a parameter, and whose gradients make up its own."""

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
    them have the whole gradient, and the same."""

    count: int
    partial: bool = False


def annotate_replication(tensor: Tensor, copies: Replication) -> None:
    """Says so of a live parameter."""
    setattr(tensor, _ATTRIBUTE, copies)


def replication_of(tensor: Tensor, axis_size: int) -> Replication:
    """What `annotate_copies` said. Without that: one copy of a tensor that is cut, and of another `axis_size`, each
    with the whole gradient."""
    copies = getattr(tensor, _ATTRIBUTE, None)
    if copies is None:
        return Replication(axis_size if layout_of(tensor) is None else 1)
    assert isinstance(copies, Replication)
    return copies
