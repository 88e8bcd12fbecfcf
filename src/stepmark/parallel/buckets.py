"""Parameters laid end to end in buckets, of which every data parallel rank has one contiguous part.

A bucket holds parameters of one optimizer group, one dtype, and as many copies on the tensor parallel axis. It is cut
evenly, wherever that falls, so that ranks differ by nothing; what pads its end is less than one element a rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stepmark.runtime.base import Runtime
from stepmark.runtime.collectives import Collectives
from stepmark.sharding.copies import copies_of
from stepmark.sharding.spec import Layout, Part, Piece, layout_of

BUCKET_ELEMENTS = 32 * 2**20  # few large collectives, and little memory beside the model


@dataclass(frozen=True)
class Member:
    """A parameter and its place in the bucket, in elements."""

    name: str
    parameter: nn.Parameter
    begin: int

    @property
    def end(self) -> int:
        return self.begin + self.parameter.numel()


class Bucket:
    """`members` without gaps, from element 0 on; `part` elements a rank, padding included."""

    def __init__(self, group: int, members: Sequence[Member], axis: Collectives, tensor_axis_size: int) -> None:
        self.group = group
        self.members = list(members)
        self.copies = copies_of(members[0].parameter, tensor_axis_size).count
        self.dtype = members[0].parameter.dtype
        self.numel = members[-1].end
        self.part = -(-self.numel // axis.size)
        self.padded = self.part * axis.size
        self.begin = axis.rank * self.part
        self.end = min(self.begin + self.part, self.numel)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The members' places in a tensor of `padded` (or `numel`) elements, in their own shapes."""
        return [flat[member.begin : member.end].view(member.parameter.shape) for member in self.members]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """The members' tensors end to end, with zeros as padding."""
        flat = [tensor.reshape(-1) for tensor in tensors]
        if self.padded > self.numel:
            flat.append(flat[0].new_zeros(self.padded - self.numel))
        return torch.cat(flat)

    def local_layouts(self) -> Iterator[tuple[Member, Layout]]:
        """What this rank's part holds of each member's global tensor. The part is one tensor of `part` elements."""
        for member in self.members:
            begin, end = max(self.begin, member.begin), min(self.end, member.end)
            if begin < end:
                whole = layout_of(member.parameter) or Layout.whole(member.parameter.shape)
                inside = (begin - member.begin, end - member.begin)
                yield member, cut(whole, tuple(member.parameter.shape), *inside, at=begin - self.begin)


def cut(layout: Layout, local_shape: tuple[int, ...], start: int, stop: int, at: int) -> Layout:
    """Elements [start, stop) of a flattened local tensor of this layout, which lie from `at` on in another tensor."""
    parts: list[Part] = []
    for part in layout.parts:
        parts.extend(_cut_part(part, local_shape, start, stop, at))
    return Layout(layout.shape, tuple(parts))


def _cut_part(part: Part, local_shape: tuple[int, ...], start: int, stop: int, at: int) -> Iterator[Part]:
    for piece, begin in _runs(part, local_shape):
        low, high = max(start, begin), min(stop, begin + piece.numel)
        if low < high:
            inner = Piece(piece.box, piece.start + low - begin, piece.start + high - begin)
            yield Part(inner, at + low - start)


def _runs(part: Part, local_shape: tuple[int, ...]) -> Iterator[tuple[Piece, int]]:
    """The part as pieces that lie in one run of the flattened local tensor, each with its first element there."""
    if isinstance(part.at, int):
        yield part.piece, part.at
        return
    lengths = part.piece.box.lengths
    strides = _strides(local_shape)
    # Trailing dims that the part fills lie in one run with the dim before them.
    dim = len(lengths)
    while dim > 0 and lengths[dim - 1] == local_shape[dim - 1]:
        dim -= 1
    dim = max(dim - 1, 0)
    for index in _indices(lengths[:dim]):
        offsets = (
            tuple(o + i for o, i in zip(part.piece.box.offsets, index, strict=False)) + part.piece.box.offsets[dim:]
        )
        box_lengths = (1,) * dim + lengths[dim:]
        places = tuple(a + i for a, i in zip(part.at, index, strict=False)) + part.at[dim:]
        begin = sum(place * stride for place, stride in zip(places, strides, strict=True))
        yield Piece.of_box(offsets, box_lengths), begin


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, stride = [], 1
    for length in reversed(shape):
        strides.append(stride)
        stride *= length
    return tuple(reversed(strides))


def _indices(lengths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not lengths:
        yield ()
        return
    for first in range(lengths[0]):
        for rest in _indices(lengths[1:]):
            yield (first, *rest)


def make_buckets(
    groups: Sequence[Sequence[tuple[str, nn.Parameter]]], axis: Collectives, tensor_axis_size: int
) -> list[Bucket]:
    """Buckets of at most BUCKET_ELEMENTS elements (one parameter may be larger), group by group, in order."""
    buckets = []
    for index, group in enumerate(groups):
        kinds: dict[tuple[torch.dtype, int], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in group:
            kinds.setdefault((parameter.dtype, copies_of(parameter, tensor_axis_size).count), []).append(
                (name, parameter)
            )
        for parameters in kinds.values():
            buckets += [Bucket(index, run, axis, tensor_axis_size) for run in _cut_into_runs(parameters)]
    return buckets


def _cut_into_runs(parameters: Sequence[tuple[str, nn.Parameter]]) -> Iterator[list[Member]]:
    run: list[Member] = []
    for name, parameter in parameters:
        if run and run[-1].end + parameter.numel() > BUCKET_ELEMENTS:
            yield run
            run = []
        run.append(Member(name, parameter, run[-1].end if run else 0))
    if run:
        yield run


def whole_on_host(bucket: Bucket, runtime: Runtime) -> Tensor:
    """The members' values in float32, on the host; `padded` elements."""
    on_host = runtime.to_host([member.parameter for member in bucket.members])
    return bucket.join([tensor.float() for tensor in on_host])
