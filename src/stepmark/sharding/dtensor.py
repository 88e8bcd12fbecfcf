"""DTensors (torch.distributed.tensor) as shards: which boxes of the global tensor this rank's local tensor holds.

A plain `Shard` cuts a dim as torch.chunk does: chunks of ceil(size / count), the last ones shorter or empty. Several
placements may cut one dim. They apply from the first mesh dim to the last, unless a `_StridedShard` says that its cut
comes after those of later mesh dims, whose sizes multiply to its split factor: `fully_shard` after tensor parallelism.
The only cut of a dim may have any split factor: a chunk of each piece, as of fused projections.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from stepmark.errors import UsageError
from stepmark.sharding.layout import Layout, Part, Shape, Shard, TensorSlice

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.tensor import DTensor

_Runs = list[tuple[int, int]]  # (first, length) of neighbouring indices along a dim, in the local tensor's order


class Cut(NamedTuple):
    """How one mesh dim cuts a tensor's dim: into `ways` parts, of which this rank has the one at `position`. `factor`
    is a `_StridedShard`'s split factor, 1 for a `Shard`."""

    mesh_dim: int
    dim: int
    ways: int
    position: int
    factor: int = 1


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether it is a DTensor; does not import torch.distributed.tensor, which takes long."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def reshard(module: nn.Module) -> None:
    """Frees what `fully_shard` has gathered in a forward pass without a backward pass: DTensors are there again."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    for each in module.modules() if kind is not None else ():
        if isinstance(each, kind):
            each.reshard()


def local_of(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, not a copy; any other tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    local: Any = tensor._local_tensor
    return local.wait() if hasattr(local, "wait") else local  # the result of a collective that may still run


def shard_of(tensor: DTensor) -> Shard:
    """The local tensor of a DTensor with its layout. Raises UsageError as `layout_of_dtensor` does, and where the local
    tensor is not what the placements give."""
    local, layout = local_of(tensor), layout_of_dtensor(tensor)
    if type(local).__name__ not in ("Tensor", "Parameter") or not _fits(layout, tuple(local.shape)):
        raise UsageError(
            f"is a DTensor whose local {type(local).__name__} of shape {list(local.shape)} is not what its placements "
            f"{tuple(tensor.placements)} give of {list(tensor.shape)}; distribute it with torch's distribute_tensor()"
        )
    return Shard(local, layout)


def _fits(layout: Layout, local: Shape) -> bool:
    """Whether a local tensor of this shape is what the layout describes."""
    if not layout.parts or 0 in layout.shape:
        return 0 in local
    boxes = [part.slice.box for part in layout.parts]
    runs = [{(box.offsets[dim], box.lengths[dim]) for box in boxes} for dim in range(len(layout.shape))]
    return local == tuple(sum(length for _, length in found) for found in runs)


def with_local(tensor: DTensor, local: Tensor) -> DTensor:
    """A new DTensor placed as `tensor`, with the values and dtype of `local`, which has its local tensor's shape."""
    import torch

    with torch.no_grad():
        new = torch.empty_like(tensor.detach(), dtype=local.dtype)
        local_of(new).copy_(local)
    assert is_dtensor(new)
    return new


def layout_of_dtensor(tensor: DTensor) -> Layout:
    """What this rank's local tensor holds: no part where the rank is outside the mesh, or its shard is empty.

    Where a `_StridedShard`'s split factor is the size of later cuts, the order of cuts is what `fully_shard` makes, and
    torch's own checkpoints assume.

    Raises UsageError for a placement other than Shard, Replicate and `_StridedShard`, such as Partial, and for several
    cuts of a dim whose split factors say no order: torch and transformers fill such tensors in different ways.
    """
    from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

    mesh, shape = tensor.device_mesh, tuple(map(int, tensor.shape))
    coordinate = mesh.get_coordinate()
    cuts = []
    for mesh_dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard | _StridedShard):
            position = 0 if coordinate is None else int(coordinate[mesh_dim])
            factor = int(getattr(placement, "split_factor", 1))
            cuts.append(Cut(mesh_dim, placement.dim % len(shape), int(mesh.shape[mesh_dim]), position, factor))
        elif not isinstance(placement, Replicate):
            raise UsageError(
                f"is a DTensor with the placement {placement!r}, whose ranks hold no slices of its values; call "
                "redistribute() to Shard or Replicate first"
            )
    if coordinate is None:
        return Layout(shape, ())
    if 0 in shape:
        return Layout.full(shape)
    shard_order = getattr(tensor._spec, "shard_order", None) or ()  # torch 2.10 and newer
    return boxes_of(shape, tuple(cuts), tuple((each.tensor_dim, tuple(each.mesh_dims)) for each in shard_order))


@lru_cache(4096)  # of a model's tensors, most are cut as many others are
def boxes_of(shape: Shape, cuts: Sequence[Cut], orders: Sequence[tuple[int, Sequence[int]]] = ()) -> Layout:
    """The boxes of the tensor of `shape` that remain after the cuts, and their places in the local tensor.

    `cuts` are in the order of mesh dims. `orders`: a DTensor's own order of mesh dims, for dims that have one. Both are
    tuples.
    """
    explicit = dict(orders)
    real = [cut for cut in cuts if cut.ways > 1]
    runs_of = [
        _runs(size, [cut for cut in real if cut.dim == dim], explicit.get(dim)) for dim, size in enumerate(shape)
    ]
    places = [list(accumulate((length for _, length in runs), initial=0)) for runs in runs_of]
    contiguous = all(len(runs) == 1 for runs in runs_of[1:])  # each box is one run of the local tensor
    parts = []
    for chosen in product(*(range(len(runs)) for runs in runs_of)):
        runs = [runs_of[dim][number] for dim, number in enumerate(chosen)]
        tensor_slice = TensorSlice.of_box([first for first, _ in runs], [length for _, length in runs])
        at = tuple(places[dim][number] for dim, number in enumerate(chosen))
        parts.append(Part(tensor_slice, sum(at[:1]) * math.prod(tensor_slice.box.lengths[1:]) if contiguous else at))
    return Layout(shape, tuple(parts))


def _runs(size: int, cuts: Sequence[Cut], explicit: Sequence[int] | None) -> _Runs:
    """The indices along a dim that remain after its cuts."""
    runs: _Runs = [(0, size)] if size else []
    ordered = _in_order(cuts) if explicit is None else sorted(cuts, key=lambda cut: explicit.index(cut.mesh_dim))
    if ordered is not None:
        for cut in ordered:
            runs = _chunk(runs, cut.ways, cut.position)
        return runs
    if len(cuts) > 1:
        factors = ", ".join(str(cut.factor) for cut in cuts)
        raise UsageError(
            f"is a DTensor with a dim that several mesh dims cut, by split factors ({factors}) that give no order; "
            "shard another dim with fully_shard's shard_placement_fn"
        )
    (cut,) = cuts
    pieces = [_chunk(_chunk(runs, cut.factor, piece), cut.ways, cut.position) for piece in range(cut.factor)]
    return _joined([run for piece in pieces for run in piece])


def _in_order(cuts: Sequence[Cut]) -> list[Cut] | None:
    """The order in which chunks are taken of chunks; None where split factors are no sizes of later cuts."""
    ordered: list[Cut] = []
    for cut in reversed(cuts):
        before = list(accumulate((other.ways for other in ordered), lambda a, b: a * b, initial=1))
        if cut.factor not in before:
            return None
        ordered.insert(before.index(cut.factor), cut)
    return ordered


def _chunk(runs: _Runs, count: int, index: int) -> _Runs:
    """The part at `index` of what torch.chunk(count) makes of these indices."""
    total = sum(length for _, length in runs)
    size = -(-total // count)
    begin, end = index * size, min((index + 1) * size, total)
    found, position = [], 0
    for first, length in runs:
        low, high = max(begin - position, 0), min(end - position, length)
        if low < high:
            found.append((first + low, high - low))
        position += length
    return found


def _joined(runs: _Runs) -> _Runs:
    """The same indices in as few runs as possible."""
    joined: _Runs = []
    for first, length in runs:
        if joined and sum(joined[-1]) == first:
            first, length = joined[-1][0], joined.pop()[1] + length
        joined.append((first, length))
    return joined
