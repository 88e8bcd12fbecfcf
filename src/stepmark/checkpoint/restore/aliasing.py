"""Finds live tensors that share memory, such as an average that starts as the model itself, but have different values
in the checkpoint, and separates them. Values are compared by reading them: checksum blocks are aligned in the file, so
equal tensors at different positions have different checksums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from stepmark.checkpoint.restore.read_plan import ReadPlan
from stepmark.checkpoint.restore.tensor_reader import ReadTarget, TensorReader
from stepmark.errors import CheckpointMismatch
from stepmark.runtime.base import has_addresses
from stepmark.runtime.device import runtime_for

_ALIGNED = 64  # bytes, a multiple of the size of every element


class _Place(NamedTuple):
    """Bytes [begin, end) of a memory that the target of this index fills, at least in part."""

    memory: str
    begin: int
    end: int
    target: int


def separate(plan: ReadPlan) -> None:
    """Gives nested state a separate tensor where its live one shares memory with one whose saved values are others.

    Raises CheckpointMismatch where both are parts of modules or optimizers, which keep their tensors.
    """
    while (pair := _clash(plan.targets, plan.reader)) is not None:
        own = next((target for target in reversed(pair) if target.replaceable), None)
        if own is None:
            names = " and ".join(f"{target.name!r} of section {target.group!r}" for target in pair)
            raise CheckpointMismatch(
                f"{names} share memory here but have different values in {plan.where}: give each its own tensor; "
                "where zero_1 has put states of an optimizer together, its parameters have not taken part in the "
                "same steps: go on without zero_1"
            )
        assert own.live is not None
        own.shape, own.live = tuple(own.live.shape), None


def _clash(targets: Sequence[ReadTarget], reader: TensorReader) -> tuple[ReadTarget, ReadTarget] | None:
    for one, other in _sharing(targets):
        same = (one.group, one.name, one.layout) == (other.group, other.name, other.layout)
        if not same and _differ(reader, one, other):
            return one, other
    return None


def _sharing(targets: Sequence[ReadTarget]) -> Iterator[tuple[ReadTarget, ReadTarget]]:
    """Pairs of targets that are or may be in the same memory; of several in one memory, the first with each."""
    places = [place for index, target in enumerate(targets) for place in _places(index, target)]
    near: list[_Place] = []
    seen: set[tuple[int, int]] = set()
    for place in sorted(places, key=lambda place: (place.memory, place.begin, -place.end, place.target)):
        near = [other for other in near if other.memory == place.memory and other.end > place.begin]
        for other in near:
            pair = (min(other.target, place.target), max(other.target, place.target))
            if pair[0] != pair[1] and pair not in seen:
                seen.add(pair)
                yield targets[pair[0]], targets[pair[1]]
        if not any((other.begin, other.end) == (place.begin, place.end) for other in near):
            near.append(place)


def _differ(reader: TensorReader, one: ReadTarget, other: ReadTarget) -> bool:
    """Whether filling `other` changes what `one` is filled with. Both are read, into memory that is laid out as theirs.

    Raises CheckpointDamaged.
    """
    assert one.live is not None
    assert other.live is not None
    _, begin, end = _extent(one.live)
    _, other_begin, other_end = _extent(other.live)
    low = min(begin, other_begin) // _ALIGNED * _ALIGNED
    size, host = max(end, other_end) - low, runtime_for(torch.device("cpu"))
    memories = [torch.full((size,), value, dtype=torch.uint8, device="cpu") for value in (0, 255)]
    for memory in memories:
        reader.fill([replace(one, live=_like(one.live, memory[begin - low : end - low]))], host)
    filled = memories[0] == memories[1]
    before = memories[0].clone()
    reader.fill([replace(other, live=_like(other.live, memories[0][other_begin - low : other_end - low]))], host)
    return bool(((memories[0] != before) & filled).any())


def _places(index: int, target: ReadTarget) -> Iterator[_Place]:
    live = target.live
    if live is None:
        return
    memory, begin, end = _extent(live)
    if not live.is_contiguous() or not all(isinstance(part.at, int) for part in target.layout.parts):
        yield _Place(memory, begin, end, index)
        return
    for part in target.layout.parts:
        assert isinstance(part.at, int)
        first = begin + part.at * live.element_size()
        yield _Place(memory, first, first + part.slice.numel * live.element_size(), index)


def _extent(live: Tensor) -> tuple[str, int, int]:
    """The memory of a tensor and its byte range. A tensor whose address is unknown counts as separate."""
    size = live.nbytes
    if size and not live.is_contiguous():
        reach = sum((length - 1) * stride for length, stride in zip(live.shape, live.stride(), strict=True))
        size = (reach + 1) * live.element_size()
    if size and has_addresses(live.device):
        return f"{live.device.type} {live.device.index}", live.data_ptr(), live.data_ptr() + size
    return f"{live.device} {id(live)}", 0, size


def _like(live: Tensor, memory: Tensor) -> Tensor:
    """A tensor laid out as `live`, in these bytes."""
    return memory.view(live.dtype).as_strided(live.shape, live.stride())
