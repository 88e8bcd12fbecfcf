"""Arithmetic on a step's gradients: completing partial ones over the tensor parallel axis and between the ends of a
pipeline, their norm, the step's totals, and clipping."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from stepmark.parallel.buckets import PIECE, Bucket
from stepmark.runtime.collectives import Collectives
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.replication import Replication

LONG = 2**13  # elements of a host tensor whose squares are not added in one go
ROW = 64
LEAST, MOST = -148, 128  # exponents of float32 numbers, as `frexp` returns them
DIGITS = 24  # of a float32 number

Gradient = TypeVar("Gradient", Tensor, Tensor | None)


def add_partial(
    gradients: Sequence[Tensor | None], replications: Sequence[Replication], mesh: Mesh
) -> list[Tensor | None]:
    """Sums partial gradients over the tensor parallel neighbours that hold replicas of the parameter: one all-reduce
    for each number of replicas and dtype."""
    complete = list(gradients)
    together: dict[tuple[int, torch.dtype], list[tuple[int, Tensor]]] = {}
    for index, (gradient, replication) in enumerate(zip(gradients, replications, strict=True)):
        if gradient is not None and replication.partial and replication.count > 1:
            together.setdefault((replication.count, gradient.dtype), []).append((index, gradient))
    for (count, _), parts in sorted(together.items(), key=lambda item: str(item[0])):
        (flat,) = mesh.replicas(count).all_reduce([torch.cat([part.reshape(-1) for _, part in parts])])
        for (index, part), total in zip(parts, flat.split([part.numel() for _, part in parts]), strict=True):
            complete[index] = total.view(part.shape)
    return complete


def add_partial_of_buckets(flat: Sequence[Tensor], buckets: Sequence[Bucket], mesh: Mesh) -> list[Tensor]:
    """The same for buckets, each of one replication."""
    complete = list(flat)
    partial = [bucket.replication.count if bucket.replication.partial else 1 for bucket in buckets]
    for count in sorted({*partial} - {1}):
        _add(complete, [number for number, each in enumerate(partial) if each == count], mesh.replicas(count))
    return complete


def add_ends(gradients: Sequence[Gradient], replications: Sequence[Replication], mesh: Mesh) -> list[Gradient]:
    """Sums the gradients of tables that both ends of a pipeline use, or buckets of them and shards of these, which both
    ends divide alike, in one call. They are reduced over the data parallel ranks before, and a sum of two is the same
    in either order: the copies stay equal bit for bit."""
    complete = list(gradients)
    pairs = enumerate(zip(gradients, replications, strict=True))
    tied = [index for index, (gradient, each) in pairs if gradient is not None and each.stages > 1]
    if mesh.ends.size > 1 and tied:
        _add(complete, tied, mesh.ends)
    return complete


def _add(tensors: list[Any], which: Sequence[int], axis: Collectives) -> None:
    """Puts the sums of some of the tensors over the ranks of an axis in their place."""
    for index, total in zip(which, axis.all_reduce([tensors[index] for index in which]), strict=True):
        tensors[index] = total


def totals(
    shards: Sequence[Tensor],
    copies: Sequence[int],
    loss: Tensor,
    loads: Tensor | None,
    mesh: Mesh,
    *more: Tensor,
    in_order: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The loss, summed over all ranks, of which `loss` has the part of each logical rank of this process; the sum of
    squares of the shards over all ranks, of which `copies` ranks of one data parallel
    coordinate hold the same one; `more` numbers (vectors), summed over the
    data parallel ranks; and the loads of experts over the stages.

    `in_order` (default: whether the logical ranks are added in their order): nothing depends on how ranks divide the
    gradients, in shards that begin at multiples of 64 elements. Squares are counted, and a number that only one rank
    has is the same in any sum with zeros."""
    ranks, device = mesh.ranks, mesh.runtime.device
    if not (ranks.fixed if in_order is None else in_order):
        head = torch.cat([loss.float().sum().reshape(1), squares(shards, copies, device), *more])
        (heads,) = mesh.data_parallel.all_reduce([head])
        first, square, rest = heads[:1], heads[1:2], heads[2:]
    else:
        kinds = sorted({*copies})
        of_kinds = [[each for each, count in zip(shards, copies, strict=True) if count == kind] for kind in kinds]
        counted = [count_squares(each, device) for each in of_kinds]
        losses = torch.zeros(ranks.total, dtype=torch.float64, device=device)
        losses[ranks.own.start : ranks.own.stop] = loss.reshape(-1)
        (heads,) = mesh.data_parallel.all_reduce([torch.cat([losses, *counted, *more])])
        losses, *counted, rest = heads.split([ranks.total, *map(len, counted), sum(map(len, more))])
        first = losses.sum().float().reshape(1)
        parts = [value_of(each) / kind for each, kind in zip(counted, kinds, strict=True)]
        square = torch.stack([losses.new_zeros(()), *parts]).sum().float().reshape(1)
    first, square, loads = over_parts(first, square, loads, mesh)
    return first, square, rest, loads


def over_parts(loss: Tensor, square: Tensor, loads: Tensor | None, mesh: Mesh) -> tuple[Tensor, Tensor, Tensor | None]:
    """The sums over the ranks that hold the parts of one model: of the loss, which only the last stage of a pipeline
    has, of squares (vectors of one element, which become 0-dim), and of the loads of experts, of which each stage has
    its own layers'."""
    (square,) = mesh.tensor_parallel.all_reduce([square])
    both = torch.cat([loss, square])
    both, *summed = mesh.pipeline.all_reduce([both] if loads is None else [both, loads])
    return both[0], both[1], summed[0] if summed else None


def squares(gradients: Sequence[Tensor], counts: Sequence[int], device: torch.device) -> Tensor:
    """The sum of squares in float32, a vector of one element on `device`; a pipeline stage may have no gradients. Each
    is divided by its number of replicas (`counts`), so that the sum over the ranks counts it once."""
    if not gradients:
        return torch.zeros(1, device=device)
    pairs = zip(norms(gradients, long=0), counts, strict=True)
    parts = [norm.float().square() / count for norm, count in pairs]
    return torch.stack(parts).sum().reshape(1)


def norms(tensors: Sequence[Tensor], *, long: int = LONG) -> list[Tensor]:
    """The 2-norm of each. On a host torch adds the squares of a tensor in a few float32 sums, which stop growing: the
    norm of 100,000 elements can be 2e-5 too small, that of 260 M 4 %. Tensors of at least `long` elements are therefore
    taken row by row, and so are the rows' norms, which is within 1e-6 of a sum in float64. Those of shorter ones are
    torch's, bit for bit."""
    if all(tensor.is_cpu for tensor in tensors):
        tensors = [_norms_of_rows(each) if each.numel() >= long else each for each in tensors]
    return list(torch._foreach_norm(list(tensors))) if tensors else []  # also on a host that of each by itself


def _norms_of_rows(tensor: Tensor) -> Tensor:
    """At most ROW numbers with the norm of the tensor."""
    flat = tensor.reshape(-1)
    while (length := flat.numel()) > ROW:
        cut = length // ROW * ROW
        whole = flat if cut == length else flat[:cut]
        rows = torch.linalg.vector_norm(whole.view(-1, ROW), dim=1)
        flat = rows if cut == length else torch.cat([rows, flat[cut:]])
    return flat


def count_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The squares of all elements, in a form whose sum is exact in any order and division (`value_of`): a float64
    vector of the sum of the digits at each exponent. Squares of 64 neighbours are added in float32 before, and of as
    many fewer at the end of a tensor of one dim, or of each row of one of two; so shards of a tensor that begin at
    multiples of 64 elements count the same, and its rows.

    After the idea of accumulators by exponent: Demmel and Nguyen, "Parallel Reproducible Summation" (2015)."""
    pieces = [piece for each in tensors for piece in _squares_of_pieces(torch.atleast_1d(each.detach()))]
    counted = torch.zeros(MOST - LEAST + 1, dtype=torch.float64, device=device)
    if not pieces:
        return counted
    digits, exponents = torch.frexp(torch.cat(pieces))
    places = exponents.clamp_(LEAST, MOST).sub_(LEAST)  # those of infinities are not defined
    return counted.index_add_(0, places, digits.double().mul_(2.0**DIGITS))


def value_of(counted: Tensor) -> Tensor:
    """What `count_squares` has counted, or a sum of such vectors: a 0-dim float64 tensor."""
    exponents = torch.arange(LEAST - DIGITS, MOST - DIGITS + 1, dtype=torch.float64, device=counted.device)
    return (counted * torch.exp2(exponents)).sum()


def _squares_of_pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The sum of squares of each piece of a tensor of one or two dims."""
    length = tensor.shape[-1]
    cut = length // PIECE * PIECE
    rows = [tensor[..., :cut].reshape(-1, PIECE)] if cut else []
    if cut < length:
        rows.append(torch.nn.functional.pad(tensor[..., cut:], (0, PIECE - length + cut)).view(-1, PIECE))
    for each in rows:
        yield torch.linalg.vector_norm(each, dim=1).square_() if each.device.type == "cpu" else halved(each.square())


def halved(rows: Tensor) -> Tensor:
    """The sum of each row, in one order on every device, whatever the number of rows is."""
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]


def scale_to(gradients: Sequence[Tensor | None], norm: Tensor, max_norm: float) -> None:
    """Scales gradients in place so that their norm is at most `max_norm`; 0 or less: never."""
    present = [gradient for gradient in gradients if gradient is not None]
    if max_norm <= 0 or not present:
        return
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if factor.device.type == "cpu" and not is_fake(factor) and float(factor) == 1.0:  # known without waiting
        return
    torch._foreach_mul_(present, factor)
