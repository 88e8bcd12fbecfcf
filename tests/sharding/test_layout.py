"""Slice arithmetic, against the same thing done element by element."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from stepmark.sharding.layout import Box, Layout, TensorSlice, annotate, layout_of, row_major_boxes, row_major_strides
from stepmark.sharding.overlap import disjoint, overlaps

shapes = st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    return Box(offsets, tuple(draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True)))


@st.composite
def slices(draw: st.DrawFn, shape: tuple[int, ...]) -> TensorSlice:
    box = draw(boxes(shape))
    start = draw(st.integers(0, box.numel))
    return TensorSlice(box, start, draw(st.integers(start, box.numel)))


def numbers(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


def elements(tensor: torch.Tensor, box: Box) -> list[int]:
    for dim, (offset, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor.reshape(-1).tolist()


def elements_of(tensor: torch.Tensor, tensor_slice: TensorSlice) -> list[int]:
    return elements(tensor, tensor_slice.box)[tensor_slice.start : tensor_slice.stop]


@given(st.data(), shapes)
def test_a_range_is_split_into_boxes_in_order(data: st.DataObject, shape: tuple[int, ...]) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    cut = [Box(offsets, lengths) for offsets, lengths in row_major_boxes(shape, start, stop)]
    assert [number for box in cut for number in elements(numbers(shape), box)] == list(range(start, stop))
    assert len(cut) <= max(1, 2 * len(shape))
    assert all(box.numel for box in cut)


@given(st.data(), shapes)
def test_blocks_cover_their_slice(data: st.DataObject, shape: tuple[int, ...]) -> None:
    tensor_slice = data.draw(slices(shape))
    first = data.draw(st.integers(0, tensor_slice.numel))
    last = data.draw(st.integers(first, tensor_slice.numel))
    blocks = tensor_slice.blocks(first, last)
    assert [n for block in blocks for n in elements(numbers(shape), block.box)] == elements_of(
        numbers(shape), tensor_slice
    )[first:last]
    assert [block.start for block in blocks] == [
        first + sum(other.box.numel for other in blocks[:index]) for index in range(len(blocks))
    ]


@given(st.data(), shapes)
def test_overlaps_are_exactly_the_common_elements(data: st.DataObject, shape: tuple[int, ...]) -> None:
    stored, wanted = data.draw(slices(shape)), data.draw(slices(shape))
    all_numbers = numbers(shape)
    stored_elements = elements_of(all_numbers, stored)
    common = set(stored_elements) & set(elements_of(all_numbers, wanted))
    pairs = overlaps(stored, wanted)
    assert disjoint([pair.box for pair in pairs])
    assert sorted(n for pair in pairs for n in elements(all_numbers, pair.box)) == sorted(common)
    flat = torch.tensor(stored_elements)
    for pair in pairs:
        found = (
            flat.as_strided(pair.box.lengths, row_major_strides(pair.source.lengths), pair.first).reshape(-1).tolist()
        )
        assert found == elements(all_numbers, pair.box)
        assert (found[0], found[-1]) == (stored_elements[pair.first], stored_elements[pair.last - 1])


@given(st.data(), shapes)
def test_intersection_and_disjointness(data: st.DataObject, shape: tuple[int, ...]) -> None:
    one, other = data.draw(boxes(shape)), data.draw(boxes(shape))
    common = set(elements(numbers(shape), one)) & set(elements(numbers(shape), other))
    found = one.intersect(other)
    assert (set() if found is None else set(elements(numbers(shape), found))) == common
    assert disjoint([one, other]) == (found is None)
    assert one.within(shape)


def test_a_layout_is_remembered_with_its_tensor() -> None:
    tensor = torch.zeros(3)
    assert layout_of(tensor) is None
    layout = Layout.box((6,), (3,), (3,))
    annotate(tensor, layout)
    assert layout_of(tensor) == layout
