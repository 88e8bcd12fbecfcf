"""A strided view of a tensor in pieces has the elements that torch's view of the whole tensor has."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stepmark.errors import CheckpointDamaged
from stepmark.model_folder.output_files import in_memory
from stepmark.sharding.layout import Shape
from stepmark.tensor_files.array_reader import ArrayReader, ElementRange
from stepmark.tensor_files.global_tensor import GlobalTensor, Piece, StoredArray
from stepmark.tensor_files.strided import as_written, strided


def in_pieces(tensor: Tensor, cuts: random.Random, *, permuted: bool = False) -> GlobalTensor:
    """The tensor in randomly cut pieces, of arrays in row-major order or with their dims in another one."""

    def cut(part: Tensor, offsets: Shape) -> Iterator[Piece]:
        dims = [dim for dim, size in enumerate(part.shape) if size > 1]
        if not dims or cuts.random() < 0.4:
            yield Piece(stored(part, permuted=permuted), offsets)
            return
        dim = cuts.choice(dims)
        at = cuts.randrange(1, part.shape[dim])
        yield from cut(part.narrow(dim, 0, at), offsets)
        moved = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
        yield from cut(part.narrow(dim, at, part.shape[dim] - at), moved)

    return GlobalTensor("x", "I32", tuple(tensor.shape), tuple(cut(tensor, (0,) * tensor.dim())))


def stored(tensor: Tensor, *, permuted: bool) -> StoredArray:
    order = tuple(range(tensor.dim()))[:: -1 if permuted else 1]
    laid_out = tensor.permute(order).clone(memory_format=torch.contiguous_format)
    data = laid_out.numpy().tobytes()
    laid_out = laid_out.permute(order)
    return StoredArray(Path(), 0, "I32", tuple(tensor.shape), laid_out.stride(), data)


def read(tensor: GlobalTensor) -> Tensor:
    tensor.check()
    memory = bytearray(tensor.nbytes)
    if memory:
        ArrayReader().fill([ElementRange(tensor, 0, math.prod(tensor.shape), memoryview(memory))])
    return torch.tensor(memoryview(memory).cast("i").tolist(), dtype=torch.int32).reshape(tensor.shape)


def random_view(tensor: Tensor, choices: random.Random) -> Tensor:
    """What chunk, transpose, reshape without a copy, select and unsqueeze make of a tensor."""
    for _ in range(choices.randrange(6)):
        dims = range(tensor.dim())
        kind = choices.choice(["transpose", "chunk", "split", "select", "unsqueeze"]) if dims else "unsqueeze"
        dim = choices.choice(dims) if dims else 0
        factors = [n for n in range(1, tensor.shape[dim] + 1) if tensor.shape[dim] % n == 0] if dims else []
        if kind == "transpose":
            tensor = tensor.transpose(dim, choices.choice(dims))
        elif kind == "chunk":
            tensor = choices.choice(tensor.chunk(choices.choice(factors), dim))
        elif kind == "split":
            tensor = tensor.unflatten(dim, (choices.choice(factors), -1))
        elif kind == "select":
            tensor = tensor.select(dim, choices.randrange(tensor.shape[dim]))
        else:
            tensor = tensor.unsqueeze(0)
    return tensor


@pytest.mark.parametrize("permuted", [False, True])
def test_any_view_of_any_pieces(permuted: bool) -> None:
    for seed in range(400):
        choices = random.Random(seed)
        shape = [choices.choice([1, 2, 3, 4, 6]) for _ in range(choices.randrange(4))]
        whole = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
        wanted = random_view(whole, choices)
        pieces = in_pieces(whole, choices, permuted=permuted)
        view = strided(pieces, wanted.storage_offset(), tuple(wanted.shape), wanted.stride())
        assert torch.equal(read(view), wanted), seed
        flat = strided(view, 0, (wanted.numel(),), (1,))  # dims whose order has changed are joined
        assert torch.equal(read(flat), wanted.flatten()), seed


def test_empty_view() -> None:
    whole = in_pieces(torch.zeros(0, 3, dtype=torch.int32), random.Random(0))
    assert read(strided(whole, 0, (3, 0), (1, 3))).shape == (3, 0)


def test_a_form_renames_takes_apart_leaves_out_and_joins() -> None:
    tensors = {
        "experts": torch.arange(24, dtype=torch.int32).reshape(2, 3, 4),
        "q": torch.arange(6, dtype=torch.int32),
        "k": torch.arange(6, 12, dtype=torch.int32),
        "norm": torch.arange(3, dtype=torch.int32),
        "table": torch.arange(5, dtype=torch.int32),
    }
    cuts = random.Random(3)
    form = {
        **dict.fromkeys(("experts", "q", "k", "table")),
        "experts.0": ["experts", 0, [4, 3], [1, 4]],
        "experts.1": ["experts", 12, [4, 3], [1, 4]],
        "qk": [[[12], [["q", [0]], [["k", 5, [1], [1]], [6]], [["k", 0, [5], [1]], [7]]]], 0, [12], [1]],
    }
    found = as_written({name: in_pieces(tensor, cuts) for name, tensor in tensors.items()}, form)
    wanted = {
        "norm": tensors["norm"],
        "experts.0": tensors["experts"][0].T,
        "experts.1": tensors["experts"][1].T,
        "qk": torch.tensor([0, 1, 2, 3, 4, 5, 11, 6, 7, 8, 9, 10], dtype=torch.int32),
    }
    assert found.keys() == wanted.keys()
    assert all(torch.equal(read(found[name]), tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize(
    "view", [["b", 0, [2], [1]], 5, ["a", -4, [2], [1]], ["a", 0, [3, -4], [4, 1]], ["a", 0, [3, 4], [0, 1]], ["a", {}]]
)
def test_a_malformed_form_is_corruption(view: Any) -> None:
    tensors = {"a": in_memory("a", torch.arange(12.0).reshape(3, 4))}
    with pytest.raises(CheckpointDamaged, match="the form in which the model is written is malformed"):
        as_written(tensors, {"x": view})


@pytest.mark.parametrize("view", [["a", 8, [3, 4], [4, 1]], [[[2, 2], [["a", [5, 5]]]], 0, [2, 2], [2, 1]]])
def test_a_form_of_more_than_there_is_is_corruption(view: Any) -> None:
    tensors = {"a": in_memory("a", torch.arange(12.0).reshape(3, 4))}
    with pytest.raises(CheckpointDamaged, match="its shards cover"):
        as_written(tensors, {"x": view})["x"].check()
