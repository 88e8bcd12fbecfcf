"""A digest of a model's tensors that is the same on any mesh: each rank reads what it holds, and a number is exchanged.

A tensor is a matrix of its last dim and all others. Its rows are divided into little-endian words of 8 bytes, and its
sum is that of row factor times word times column factor, modulo 2^64. The factors are odd and pseudo-random. So sums
of slices add up to that of the tensor, and any changed element changes it. It detects other values, not forged ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import xxhash
from torch import Tensor

from stepmark.parallel.full_sharding import is_fully_sharded, layer_of
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.dtensor import shard_of
from stepmark.sharding.layout import Box, Layout, layout_of
from stepmark.sharding.replication import replication_of
from stepmark.sharding.views import block_views

WORD = 8  # bytes
ROWS_AT_ONCE = 1 << 22  # words that are read at once, to bound memory
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def mesh_digest(tensors: Iterable[tuple[str, Tensor]], mesh: Mesh) -> str:
    """The digest of a model's tensors by name, of which this rank holds shards. Collective."""
    runtime, axis = mesh.runtime, mesh.tensor_parallel
    runtime.step_boundary()
    found: list[tuple[str, int]] = []
    each: Any
    for name, each in tensors:
        tensor = each.detach()
        replication = replication_of(each, axis.size)
        first = mesh.same(replication.experts).rank == 0
        counts, layout = first and axis.rank % replication.count == 0, layout_of(each)
        if is_fully_sharded(each):
            counts = mesh.data_parallel.rank < mesh.data_parallel.size // layer_of(each).copies
            tensor, layout = shard_of(each).tensor.detach(), shard_of(each).layout
        total = tensor_sum(runtime.to_host([tensor])[0], layout) if counts else 0
        found.append((_described(name, each), total))
    ranks = mesh.context.host.all_gather([total for _, total in found])
    return _combined((text, sum(sums)) for (text, _), sums in zip(found, zip(*ranks, strict=True), strict=True))


def complete_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The same digest, of complete tensors on the host."""
    return _combined((_described(name, tensor), tensor_sum(tensor.detach(), None)) for name, tensor in tensors)


def _described(name: str, tensor: Tensor) -> str:
    return f"{name} {tuple((layout_of(tensor) or tensor).shape)} {tensor.dtype}"


def _combined(sums: Iterable[tuple[str, int]]) -> str:
    hashed = xxhash.xxh3_128()
    for text, total in sorted(sums):
        hashed.update(f"{text} {total % 2**64}\n".encode())
    return hashed.hexdigest()


def tensor_sum(tensor: Tensor, layout: Layout | None) -> int:
    """The sum of the elements that a local tensor on the host holds of a global one; of the slices of all, once each,
    it is that of the complete tensor, modulo 2^64."""
    layout = layout or Layout.full(tuple(tensor.shape))
    integers = tensor.contiguous().view(_INTEGERS[tensor.element_size()])
    pairs = (pair for part in layout.parts for pair in block_views(integers, part, 0, part.slice.numel))
    return sum(_block_sum(view, block.box, layout.shape) for block, view in pairs)


def _block_sum(values: Tensor, box: Box, shape: tuple[int, ...]) -> int:
    """The sum of a box of integers."""
    if not values.numel():
        return 0
    columns = box.lengths[-1] if box.lengths else 1
    first = box.offsets[-1] if box.offsets else 0
    rows = _row_numbers(box, shape)
    matrix = values.reshape(len(rows), columns)
    words, factors = _words(matrix, first, matrix.element_size())
    step = max(1, ROWS_AT_ONCE // max(1, words(0, 1).shape[1]))
    sums = [words(begin, begin + step) @ factors for begin in range(0, len(rows), step)]
    return int((torch.cat(sums) * odd(rows, 1)).sum())


def _row_numbers(box: Box, shape: tuple[int, ...]) -> Tensor:
    """The numbers of a box's rows in the global matrix."""
    rows = torch.zeros(1, dtype=torch.int64)
    for offset, length, size in zip(box.offsets[:-1], box.lengths[:-1], shape[:-1], strict=True):
        rows = (rows[:, None] * size + torch.arange(offset, offset + length)).reshape(-1)
    return rows


def _words(matrix: Tensor, first: int, size: int) -> tuple[Callable[[int, int], Tensor], Tensor]:
    """Rows as int64, and the factors of their columns. `first`: the number of the matrix's first column."""
    each, columns = WORD // size, matrix.shape[1]
    if first % each == 0 and columns % each == 0:
        words = matrix.contiguous().view(torch.int64)
        return lambda begin, end: words[begin:end], odd(torch.arange(first // each, (first + columns) // each), 0)
    numbers = torch.arange(first, first + columns)
    factors = odd(numbers // each, 0) << (numbers % each * (8 * size))
    mask = (1 << 8 * size) - 1 if size < WORD else -1
    return lambda begin, end: matrix[begin:end].to(torch.int64) & mask, factors


def odd(numbers: Tensor, kind: int) -> Tensor:
    """An odd pseudo-random int64 for each number: splitmix64 (Steele, Lea, Flood 2014)."""
    state = (numbers * 2 + kind + 1) * (0x9E3779B97F4A7C15 - 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ _shifted(state, shift)) * (factor - 2**64)  # as int64
    return (state ^ _shifted(state, 31)) | 1


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shifted to the right, filled with zeros."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
