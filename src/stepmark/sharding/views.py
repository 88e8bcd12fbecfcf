"""Views of local tensors: the memory that holds a slice of a global tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stepmark.sharding.layout import Block, Box, Layout, Part, Shape

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


def host_array(tensor: Tensor, *, write: bool = False) -> NDArray[Any]:
    """The memory of a tensor on the host, as unsigned integers of the size of its elements.

    `Tensor.numpy` asks for memory to write to, which ends torch's copy-on-write by a copy, and fixes the storage's size
    for good, by which save/snapshot.py sees that arrays may be left.
    """
    return np.asarray(_HostMemory(tensor, write))


class _HostMemory:
    """What numpy needs to know of a tensor, which it keeps alive."""

    def __init__(self, tensor: Tensor, write: bool) -> None:
        import torch

        found: Any = torch._C
        self._tensor, size = tensor, tensor.itemsize
        if not write and hasattr(found, "_is_cow_tensor") and found._is_cow_tensor(tensor):
            storage = found._data_address(tensor.as_strided((0,), (1,), 0))  # data_ptr() would be for writing
            address = storage + tensor.storage_offset() * size
        else:
            address = tensor.data_ptr()
        self.__array_interface__ = {
            "version": 3,
            "data": (address, not write),
            "typestr": f"=u{size}",
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
        }


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes of its values in row-major order, of which every backend can send and compare some."""
    import torch

    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def is_row_major(tensor: Tensor) -> bool:
    """Whether its memory holds its values in row-major order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def block_views(tensor: Tensor, part: Part, start: int, stop: int) -> list[tuple[Block, Tensor]]:
    """Elements [start, stop) of a part's slice as blocks, each with the view of the local tensor that holds it.

    The tensor is contiguous where the part lies in one run of it.
    """
    views = []
    for block in part.slice.blocks(start, stop):
        if isinstance(part.at, int):
            begin = part.at + block.start
            view = tensor.reshape(-1)[begin : begin + block.box.numel].view(block.box.lengths)
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


def local_shard(complete: Tensor, layout: Layout, shape: Shape) -> Tensor:
    """The local tensor of `shape` that `layout` describes, copied from the complete one; padding is zero."""
    local = complete.new_zeros(shape)
    copy_slices(complete, local, layout)
    return local


def narrow(tensor: Tensor, box: Box) -> Tensor:
    """The view of the elements in a box."""
    for dim, (offset, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor
