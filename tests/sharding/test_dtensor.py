"""Boxes of DTensors, against the local tensors that torch cuts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from stepmark.errors import UsageError
from stepmark.sharding.dtensor import Cut, boxes_of, is_dtensor, layout_of_dtensor, shard_of, with_local
from stepmark.sharding.layout import Layout
from stepmark.sharding.overlap import disjoint
from stepmark.sharding.views import copy_slices
from tests.support.dtensor_programs import fake_ranks, tensor_parallel_and_sharded

Coordinate = tuple[int, ...]

shapes = st.lists(st.integers(1, 13), min_size=1, max_size=3).map(tuple)
meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


def numbers(shape: Sequence[int]) -> Tensor:
    return torch.arange(1, 1 + math.prod(shape)).reshape(tuple(shape))


def layout(shape: tuple[int, ...], mesh: Sequence[int], coordinate: Coordinate, placements: Sequence[Any]) -> Layout:
    cuts = [
        Cut(mesh_dim, placement.dim, mesh[mesh_dim], coordinate[mesh_dim], getattr(placement, "split_factor", 1))
        for mesh_dim, placement in enumerate(placements)
        if placement is not None
    ]
    return boxes_of(shape, tuple(cuts))


def cut_by_torch(tensor: Tensor, mesh: Sequence[int], coordinate: Coordinate, placements: Sequence[Any]) -> Tensor:
    for size, index, placement in zip(mesh, coordinate, placements, strict=True):
        if placement is not None:
            tensor = placement._split_tensor(tensor, size, with_padding=False)[0][index]
    return tensor


def same(found: Layout, complete: Tensor, local: Tensor) -> None:
    """The local tensor has exactly the elements that the layout says, where it says."""
    filled = torch.zeros_like(local)
    copy_slices(complete, filled, found)
    assert torch.equal(filled, local)
    assert sum(part.slice.numel for part in found.parts) == local.numel()
    assert disjoint([part.slice.box for part in found.parts])


def coordinates(mesh: Sequence[int]) -> Iterator[Coordinate]:
    return product(*(range(size) for size in mesh))


@given(st.data(), shapes, meshes)
def test_shards_of_any_dims_are_what_torch_cuts(
    data: st.DataObject, shape: tuple[int, ...], mesh: tuple[int, ...]
) -> None:
    dims = [data.draw(st.one_of(st.none(), st.integers(0, len(shape) - 1))) for _ in mesh]
    placements = [None if dim is None else Shard(dim) for dim in dims]
    for coordinate in coordinates(mesh):
        found = layout(shape, mesh, coordinate, placements)
        same(found, numbers(shape), cut_by_torch(numbers(shape), mesh, coordinate, placements))
        assert len(found.parts) <= 1


@given(st.data(), shapes, meshes)
def test_a_strided_shard_cuts_what_later_mesh_dims_have_cut(
    data: st.DataObject, shape: tuple[int, ...], mesh: tuple[int, ...]
) -> None:
    """As fully_shard does after tensor parallelism, uneven and empty shards included."""
    ranks, dim = data.draw(st.integers(1, 4)), data.draw(st.integers(0, len(shape) - 1))
    placements = [Shard(data.draw(st.integers(0, len(shape) - 1))) for _ in mesh]
    factor = math.prod(size for size, other in zip(mesh, placements, strict=True) if other.dim == dim)
    first = _StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim)
    for index, *coordinate in coordinates((ranks, *mesh)):
        before = cut_by_torch(numbers(shape), mesh, tuple(coordinate), placements)
        found = layout(shape, (ranks, *mesh), (index, *coordinate), [first, *placements])
        same(found, numbers(shape), cut_by_torch(before, (ranks,), (index,), [Shard(dim)]))


@given(st.data(), st.integers(1, 3), st.integers(2, 4), st.integers(2, 4))
def test_a_strided_shard_without_later_cuts_takes_a_chunk_of_each_piece(
    data: st.DataObject, rows: int, factor: int, size: int
) -> None:
    """As fused projections are divided; torch 2.9 cuts them so where all pieces are even."""
    even = data.draw(st.integers(1, 3)) * factor * size
    length = even if torch.__version__ < "2.10" else data.draw(st.integers(1, 3 * factor * size))
    shape = (length, rows) if data.draw(st.booleans()) else (rows, length)
    dim = shape.index(length) if length != rows else 0
    placement = _StridedShard(dim, split_factor=factor)
    for index in range(size):
        found = layout(shape, (size,), (index,), [placement])
        same(found, numbers(shape), cut_by_torch(numbers(shape), (size,), (index,), [placement]))


def test_an_order_of_cuts_that_a_dtensor_gives_is_followed() -> None:
    for index, other in coordinates((2, 3)):
        found = boxes_of((10,), (Cut(0, 0, 2, index), Cut(1, 0, 3, other)), ((0, (1, 0)),))
        same(found, numbers((10,)), numbers((10,)).chunk(3)[other].chunk(2)[index])


@pytest.mark.parametrize("rank", range(6))
def test_real_dtensors(rank: int) -> None:
    with fake_ranks((2, 3), rank) as mesh:
        complete = numbers((7, 5)).float()
        for placements in product((Replicate(), Shard(0), Shard(1)), repeat=2):
            tensor = distribute_tensor(complete, mesh, placements, src_data_rank=None)
            assert is_dtensor(tensor)
            assert is_dtensor(nn.Parameter(tensor))
            shard = shard_of(tensor)
            same(shard.layout, complete, shard.tensor)
            assert shard.tensor.data_ptr() == tensor.to_local().data_ptr()
            new = with_local(tensor, shard.tensor.double())
            assert (new.placements, new.dtype) == (tensor.placements, torch.double)
            assert torch.equal(new.to_local(), tensor.to_local().double())
        scalar = distribute_tensor(torch.tensor(3.0), mesh, [Replicate()] * 2, src_data_rank=None)
        assert layout_of_dtensor(scalar) == Layout.full(())
        empty = distribute_tensor(torch.zeros(0, 4), mesh, [Shard(0)] * 2, src_data_rank=None)
        assert layout_of_dtensor(empty) == Layout.full((0, 4))


@pytest.mark.parametrize("rows", [2, 9, 10, 12])
@pytest.mark.parametrize("rank", range(8))
def test_what_fully_shard_makes_of_tensor_parallel_parameters(rank: int, rows: int) -> None:
    with fake_ranks((4, 2), rank) as mesh:
        module = nn.Linear(3, rows)
        complete = module.weight.detach().clone()
        tensor_parallel_and_sharded(module, mesh)
        assert isinstance(module.weight, DTensor)
        shard = shard_of(module.weight)
        same(shard.layout, complete, shard.tensor)
        assert len(shard.layout.parts) <= 1


def test_ranks_outside_the_mesh_hold_nothing() -> None:
    with fake_ranks((4,), 3) as mesh:
        part = DeviceMesh("cpu", [0, 1, 2])
        shard = shard_of(distribute_tensor(torch.ones(6), part, [Shard(0)], src_data_rank=None))
        assert shard.layout == Layout((6,), ())
        assert layout_of_dtensor(distribute_tensor(torch.ones(6), mesh, [Shard(0)], src_data_rank=None)).parts == ()


def test_split_factors_that_give_no_order_are_refused() -> None:
    """fully_shard over fused projections holds other rows than a loader that goes by the placements."""
    with pytest.raises(UsageError, match=r"split factors \(2, 4\) that give no order"):
        layout((16,), (2, 2), (0, 0), [_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=4)])
    whole = layout((16,), (1, 2), (0, 0), [_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=4)])
    assert len(whole.parts) == 4  # a mesh dim of one rank cuts nothing


def test_what_is_no_slice_is_refused_by_name() -> None:
    with fake_ranks((2,), 1) as mesh:
        with pytest.raises(UsageError, match=r"Partial.*redistribute"):
            shard_of(DTensor.from_local(torch.ones(4), mesh, [Partial()]))
        odd = DTensor.from_local(torch.ones(4), mesh, [Shard(0)], shape=torch.Size((5,)), stride=(1,))
        with pytest.raises(UsageError, match=r"shape \[4\] is not what its placements"):
            shard_of(odd)
