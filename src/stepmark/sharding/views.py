"""Views of local tensors: the memory that holds a slice of a global tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepmark.sharding.layout import Block, Box, Layout, Part

if TYPE_CHECKING:
    from torch import Tensor


def is_row_major(tensor: Tensor) -> bool:
    """Whether its memory holds its values in row-major order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def flattened(tensor: Tensor) -> Tensor:
    """The tensor as one dim: a view where it is contiguous, else a copy."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)


def block_views(tensor: Tensor, part: Part, start: int, stop: int) -> list[tuple[Block, Tensor]]:
    """Elements [start, stop) of a part's slice as blocks, each with the view of the local tensor that holds it.

    The tensor is contiguous where the part lies in one run of it.
    """
    views = []
    for block in part.slice.blocks(start, stop):
        if isinstance(part.at, int):
            begin = part.at + block.start
            view = flattened(tensor)[begin : begin + block.box.numel].view(block.box.lengths)
        else:
            inside = block.box.relative_to(part.slice.box.offsets)
            at = tuple(a + b for a, b in zip(part.at, inside.offsets, strict=True))
            view = narrow(tensor, Box(at, inside.lengths))
        views.append((block, view))
    return views


def copy_slices(complete: Tensor, local: Tensor, layout: Layout) -> None:
    """Copies what `layout` says from the complete tensor to the local one, converted to its dtype; the rest stays."""
    for part in layout.parts:
        for block, view in block_views(local, part, 0, part.slice.numel):
            view.copy_(narrow(complete, block.box))


def narrow(tensor: Tensor, box: Box) -> Tensor:
    """The view of the elements in a box."""
    for dim, (offset, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor
