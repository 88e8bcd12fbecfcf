"""Whole parameters divided among ranks, and the rounds in which each rank sends the others its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

ROUND_ELEMENTS = 8 * 2**20  # of one rank: the full bandwidth, and little memory beside the model


def divide(costs: Sequence[int], ranks: int) -> list[int]:
    """The rank of each item: the costliest first, each to the rank with the lowest cost so far (Graham 1969). The same
    on every rank."""
    totals, owners = [0] * ranks, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        owners[index] = min(range(ranks), key=lambda rank: (totals[rank], rank))
        totals[owners[index]] += costs[index]
    return owners


@dataclass(frozen=True)
class Round:
    """What the ranks send at a time.

    Attributes:
        dtype: Of all its parameters.
        sent: For each rank the positions of the parameters that it sends, end to end.
        length: Elements that each rank sends, padding included.
    """

    dtype: torch.dtype
    sent: tuple[tuple[int, ...], ...]
    length: int


def make_rounds(
    parameters: Sequence[Tensor], owners: Sequence[int], ranks: int, limit: int = ROUND_ELEMENTS
) -> list[Round]:
    """Rounds that send every parameter once; a rank sends at most `limit` elements at a time, or one parameter."""
    rounds, sizes = [], [parameter.numel() for parameter in parameters]
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        own: list[list[int]] = [[] for _ in range(ranks)]
        for index, (parameter, owner) in enumerate(zip(parameters, owners, strict=True)):
            if parameter.dtype == dtype:
                own[owner].append(index)
        for sent in zip_longest(*(runs_of(indices, sizes, limit) for indices in own), fillvalue=()):
            length = max(sum(sizes[index] for index in run) for run in sent)
            rounds.append(Round(dtype, sent, length))
    return rounds


def runs_of(indices: Sequence[int], sizes: Sequence[int], limit: int) -> Iterator[tuple[int, ...]]:
    """Runs of at most `limit` elements (more where one parameter has more); `sizes` are those of all parameters."""
    run: list[int] = []
    elements = 0
    for index in indices:
        if run and elements + sizes[index] > limit:
            yield tuple(run)
            run, elements = [], 0
        run.append(index)
        elements += sizes[index]
    if run:
        yield tuple(run)
