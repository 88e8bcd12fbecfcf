"""Puts the tensors of ranks together: applies moves to arrays in files."""

from __future__ import annotations

from collections.abc import Sequence

from stepmark.errors import CheckpointDamaged
from stepmark.interchange.neuron.key_value_layout import Move
from stepmark.tensor_files.global_tensor import GlobalTensor, Piece, moved


class PartMissing(CheckpointDamaged):
    """The parts of some ranks are in no file."""


def unsharded(locals_: Sequence[GlobalTensor], moves: Sequence[Move]) -> dict[str, GlobalTensor]:
    """The global tensors that the ranks' tensors, which may be in several pieces themselves, are parts of.

    Raises CheckpointDamaged where the ranks' tensors have different types.
    """
    dtypes = {tensor.source_dtype for tensor in locals_}
    if len(dtypes) != 1:
        raise CheckpointDamaged(f"{locals_[0].where} is {' and '.join(sorted(dtypes))} on different ranks")
    found: dict[str, GlobalTensor] = {}
    by_name: dict[str, list[Move]] = {}
    for move in moves:
        by_name.setdefault(move.name, []).append(move)
    for name, own in by_name.items():
        local, dim = locals_[0], own[0].dim
        if not local.shape:
            pieces, replicas = local.pieces, tuple(piece for other in locals_[1:] for piece in other.pieces)
            found[name] = GlobalTensor(local.name, local.dtype, (), pieces, replicas, local.rounds)
            continue
        size = max(move.at + move.length for move in own)
        shape = (*local.shape[:dim], size, *local.shape[dim + 1 :])
        taken = [piece for move in own if not move.replica for piece in _moved(locals_[move.rank].pieces, local, move)]
        again = [piece for move in own if move.replica for piece in _moved(locals_[move.rank].pieces, local, move)]
        again += [piece for move in own for piece in _moved(locals_[move.rank].replicas, local, move)]
        found[name] = GlobalTensor(local.name, local.dtype, shape, tuple(taken), tuple(again), local.rounds)
    return found


def _moved(pieces: Sequence[Piece], local: GlobalTensor, move: Move) -> list[Piece]:
    offsets = [0] * len(local.shape)
    offsets[move.dim] = move.at
    return moved(pieces, local.range_along(move.dim, move.start, move.length), tuple(offsets))


def row_chunks(name: str, chunks: Sequence[GlobalTensor], shape: Sequence[int]) -> GlobalTensor:
    """A tensor that ZeRO-1 cut along dim 0 into equal chunks, the last ones padded; `shape` is without padding.

    Raises CheckpointDamaged where chunks do not fit the shape, PartMissing where there are too few.
    """
    rows, first = shape[0], chunks[0]
    size = first.shape[0] if first.shape else 0
    inner = tuple(shape[1:])
    if any(chunk.shape != (size, *inner) for chunk in chunks) or size > -(-rows // len(chunks)):
        raise CheckpointDamaged(f"{first.where}: its chunks {[list(c.shape) for c in chunks]} are not of {list(shape)}")
    if size * len(chunks) < rows:
        raise PartMissing(
            f"{first.where}: {len(chunks)} chunks of {size} rows are not the {rows} rows of the tensor; a data "
            "parallel rank's file is missing"
        )
    pieces: list[Piece] = []
    for number, chunk in enumerate(chunks):
        length = max(0, min(size, rows - number * size))
        pieces += moved(chunk.pieces, chunk.range_along(0, 0, length), (number * size, *(0 for _ in inner)))
    return GlobalTensor(name, first.dtype, tuple(shape), tuple(pieces))
