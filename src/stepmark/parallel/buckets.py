"""Parameters, or their gradients, concatenated in flat buckets, of which every data parallel rank has one contiguous
shard.

A bucket holds parameters of one optimizer group, one dtype and one replication over the tensor parallel axis. Its
shards have equal sizes regardless of parameter boundaries; padding at its end is less than one element per rank. Where
sums are in a fixed order, parameters and shards begin at multiples of 64 elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.errors import UsageError
from stepmark.filesystem.sizes import in_groups
from stepmark.runtime.base import Runtime
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.layout import Box, Layout, Part, Shape, TensorSlice, layout_of, row_major_index
from stepmark.sharding.replication import replication_of
from stepmark.sharding.views import narrow

HOST_BUCKET_ELEMENTS = 6 * 2**20  # several in flight while received ones are added up, each worth its overhead
EAGER_BUCKET_ELEMENTS = 8 * 2**20  # the full bandwidth between accelerators, and still several to overlap
LAZY_BUCKET_ELEMENTS = 32 * 2**20  # few large collectives in a graph, and little memory beside the model
PIECE = 64  # elements of a parameter that no shard divides: kernels treat the last few of a tensor in another way
FIRST_BUCKET = 1 / 6  # of the others' size: see `make_buckets`


@dataclass(frozen=True)
class Member:
    """A parameter and its position in the bucket, in elements.

    Attributes:
        parameter: This rank's parameter, which tensor parallelism may have sharded.
        begin: Offset of its first element in the bucket.
        boxes: The parameter's slices in the order in which they are concatenated, each in row-major order. One box, the
            complete parameter, unless it holds several projections side by side, such as GPT-2's fused query, key and
            value: stored one after the other, a rank's shard covers few slices of the global tensor, not one per row.
        runs: The slices of the global tensor that the parameter holds, with their offsets in the member.
    """

    name: str
    parameter: nn.Parameter
    begin: int
    boxes: tuple[Box, ...]
    runs: tuple[tuple[TensorSlice, int], ...]

    @classmethod
    def of(cls, name: str, parameter: nn.Parameter, begin: int) -> Member:
        shape = tuple(parameter.shape)
        layout = layout_of(parameter) or Layout.full(shape)
        slices = [part.slice for part in layout.parts]
        boxes: tuple[Box, ...] = (Box.full(shape),)
        places: list[Any] = [_place_of_run(part, shape) for part in layout.parts]
        if None in places:
            boxes = tuple(Box(part.at, part.slice.box.lengths) for part in layout.parts)  # type: ignore[arg-type]
            places = list(accumulate((each.numel for each in slices[:-1]), initial=0))
        return cls(name, parameter, begin, boxes, tuple(zip(slices, places, strict=True)))

    @classmethod
    def in_place(cls, name: str, parameter: nn.Parameter, begin: int) -> Member:
        """A member that is stored as it is, and is not saved from the bucket."""
        return cls(name, parameter, begin, (Box.full(tuple(parameter.shape)),), ())

    @property
    def end(self) -> int:
        return self.begin + self.parameter.numel()

    @property
    def in_order(self) -> bool:
        """Whether the elements have the same order in the bucket as in the parameter."""
        return len(self.boxes) == 1

    def boxes_of(self, tensor: Tensor) -> list[Tensor]:
        """Views of the boxes of a tensor of the parameter's shape."""
        return [tensor] if self.in_order else [narrow(tensor, box) for box in self.boxes]

    def places_in(self, flat: Tensor) -> list[Tensor]:
        """Views of the boxes in the bucket's flat tensor."""
        places, begin = [], self.begin
        for box in self.boxes:
            places.append(flat[begin : begin + box.numel].view(box.lengths))
            begin += box.numel
        return places

    def write(self, tensor: Tensor, flat: Tensor) -> None:
        """Copies a tensor of the parameter's shape to the bucket's flat tensor, unless it is a view of its place."""
        for place, box in zip(self.places_in(flat), self.boxes_of(tensor), strict=True):
            if not same_memory(place, box):
                place.copy_(box)

    def read(self, flat: Tensor) -> Tensor:
        """What is at the parameter's place in the bucket's flat tensor, in the parameter's shape: a view, if it can."""
        places = self.places_in(flat)
        if self.in_order:
            return places[0]
        found = flat.new_empty(self.parameter.shape)
        for box, place in zip(self.boxes_of(found), places, strict=True):
            box.copy_(place)
        return found

    def read_from(self, flat: Tensor) -> None:
        """Copies the values in the bucket's flat tensor to the parameter."""
        for place, box in zip(self.places_in(flat), self.boxes_of(self.parameter), strict=True):
            box.copy_(place)


def same_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata and (
        (one.storage_offset(), one.stride()) == (other.storage_offset(), other.stride())
    )


class Bucket:
    """`members` one after the other from element 0 on; a rank's shard has `shard_size` elements, padding included.
    `axis`: the data parallel ranks that hold the same members."""

    def __init__(self, group: int, members: Sequence[Member], mesh: Mesh) -> None:
        self.group = group
        self.members = list(members)
        self.replication = replication_of(members[0].parameter, mesh.tensor_parallel.size)
        self.axis = axis = mesh.same(self.replication.experts)
        self.dtype = members[0].parameter.dtype
        self.numel = members[-1].end
        self.shard_size = _rounded(-(-self.numel // axis.size), mesh)
        self.padded = self.shard_size * axis.size
        self.begin = axis.rank * self.shard_size
        self.end = min(self.begin + self.shard_size, self.numel)

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """The members' tensors at their places, and zeros between them."""
        ends = [*(member.begin for member in self.members[1:]), self.padded]
        flat = []
        for member, tensor, end in zip(self.members, tensors, ends, strict=True):
            flat += [box.reshape(-1) for box in member.boxes_of(tensor)]
            if end > member.end:
                flat.append(flat[-1].new_zeros(end - member.end))
        return torch.cat(flat)

    def gaps(self) -> Tensor:
        """The elements between members and behind them, by index: int64."""
        begins = [*(member.begin for member in self.members), self.padded]
        ends = [0, *(member.end for member in self.members)]
        return torch.cat([torch.arange(end, begin) for end, begin in zip(ends, begins, strict=True)])

    def local_layouts(self) -> Iterator[tuple[Member, Layout]]:
        """Which elements of each member's global tensor this rank's shard holds, at which offsets in it."""
        for member in self.members:
            parts = []
            for tensor_slice, offset in member.runs:
                first = member.begin + offset  # in the bucket
                begin, end = max(self.begin, first), min(self.end, first + tensor_slice.numel)
                if begin < end:
                    start = tensor_slice.start - first
                    parts.append(Part(TensorSlice(tensor_slice.box, start + begin, start + end), begin - self.begin))
            layout = layout_of(member.parameter) or Layout.full(member.parameter.shape)
            if parts or not member.parameter.numel():  # each rank has the state of one without elements
                yield member, Layout(layout.shape, tuple(parts)) if parts else layout


def _place_of_run(part: Part, local_shape: Shape) -> int | None:
    """Offset of the part in the flattened local tensor; None where it is not contiguous there."""
    if isinstance(part.at, int):
        return part.at
    lengths = part.slice.box.lengths
    first = next((dim for dim, length in enumerate(lengths) if length > 1), len(lengths))
    if lengths[first + 1 :] != local_shape[first + 1 :]:
        return None
    return row_major_index(part.at, local_shape)


def make_buckets(
    groups: Sequence[Sequence[tuple[str, nn.Parameter]]],
    mesh: Mesh,
    limit: int | None = None,
    *,
    reordered: bool = True,
) -> list[Bucket]:
    """Buckets of at most `limit` elements (one parameter may be larger), group by group, in order. Without a limit the
    device determines it. On eager devices the first one of a group is smaller: its gradients are complete last, so
    that nothing is computed while they travel, and its new values are the first that a forward pass waits for.
    `reordered`: store several projections side by side one after the other (see `Member`)."""
    eager = HOST_BUCKET_ELEMENTS if mesh.runtime.host_memory else EAGER_BUCKET_ELEMENTS
    limit = limit or (LAZY_BUCKET_ELEMENTS if mesh.runtime.lazy else eager)
    first = limit if mesh.runtime.lazy else int(limit * FIRST_BUCKET)
    make = Member.of if reordered else Member.in_place
    buckets = []
    for index, group in enumerate(groups):
        kinds: dict[object, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in group:
            check_real(name, parameter)
            kind = (parameter.dtype, replication_of(parameter, mesh.tensor_parallel.size))
            kinds.setdefault(kind, []).append((name, parameter))
        for parameters in kinds.values():
            for named in in_groups(parameters, [parameter.numel() for _, parameter in parameters], limit, first):
                begins = accumulate((_rounded(parameter.numel(), mesh) for _, parameter in named), initial=0)
                members = [make(name, parameter, at) for (name, parameter), at in zip(named, begins, strict=False)]
                buckets.append(Bucket(index, members, mesh))
    return buckets


def _rounded(elements: int, mesh: Mesh) -> int:
    """The same or more, where updates must not depend on how many ranks divide a bucket."""
    return -(-elements // PIECE) * PIECE if mesh.ranks.fixed else elements


def for_each_axis(
    operation: str, buckets: Sequence[Bucket], tensors: Sequence[Tensor], order: Sequence[int] | None = None
) -> list[Tensor]:
    """A collective over each bucket's tensor, sent in `order` along each of the buckets' axes."""
    found: dict[int, Tensor] = {}
    order = range(len(buckets)) if order is None else order
    for axis in dict.fromkeys(bucket.axis for bucket in buckets):
        own = [number for number in order if buckets[number].axis is axis]
        results = getattr(axis, operation)([tensors[number] for number in own])
        found.update(zip(own, results, strict=True))
    return [found[number] for number in range(len(buckets))]


def check_real(name: str, parameter: nn.Parameter) -> None:
    """Raises UsageError for a complex parameter, or one of float64: gradients are added in float32."""
    if parameter.is_complex() or parameter.dtype == torch.float64:
        raise UsageError(
            f"{name}: is a parameter of {parameter.dtype}, and gradients are added in float32; convert it to that, a "
            "complex one by torch.view_as_real, and back where it is used (torch.view_as_complex)"
        )


def shard_on_host(bucket: Bucket, runtime: Runtime) -> Tensor:
    """This rank's shard of the members' values in float32, on the host: `shard_size` elements."""
    on_host = runtime.to_host([member.parameter for member in bucket.members])
    return bucket.join([tensor.float() for tensor in on_host])[bucket.begin : bucket.begin + bucket.shard_size].clone()
