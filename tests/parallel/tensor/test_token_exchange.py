"""Tokens reach the ranks of their experts and come back: outputs and every gradient are those of one rank."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stepmark.parallel.tensor.token_exchange import NOBODY, GatheredTokens, RoutedTokens

EXPERTS, CHOSEN, WIDTH = 12, 3, 5
ROOT = Path(__file__).resolve().parents[3]
ROUTES = {
    "at random": lambda rank, tokens: torch.rand(tokens, EXPERTS).topk(CHOSEN).indices,
    "to one rank": lambda rank, tokens: torch.arange(CHOSEN).expand(tokens, CHOSEN),
    "to the next rank": lambda rank, tokens: torch.arange(CHOSEN).expand(tokens, CHOSEN) + (rank + 1) % 2 * CHOSEN,
    "some nowhere": lambda rank, tokens: (
        torch.rand(tokens, EXPERTS).topk(CHOSEN).indices.masked_fill(torch.arange(tokens)[:, None] % 2 == 1, NOBODY)
    ),
}


def experts(weight: Tensor, begin: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """A layer without activations, whose experts begin with that number; what others compute is left out."""
    own = (index >= begin) & (index < begin + len(weight))
    outputs = torch.einsum("th,tkhd->tkd", hidden, weight[(index - begin).where(own, 0)])
    return (outputs * (weights * own)[..., None]).sum(1)


def run(layer: Any, weight: Tensor, hidden: Tensor, index: Tensor, weights: Tensor) -> list[Tensor]:
    """The output, and the gradients of all three of the tensors."""
    leaves = [each.clone().requires_grad_() for each in (weight, hidden, weights)]
    output = layer(leaves[0], leaves[1], index, leaves[2])
    output.pow(2).sum().backward()
    return [output.detach(), *(each.grad for each in leaves)]


def over_ranks(axes: list[Any], exchanges: list[Any], weight: Tensor, given: list[list[Tensor]]) -> list[list[Tensor]]:
    """What `run` finds on each rank, each with its own part of the experts."""
    found: list[Any] = [None] * len(axes)
    count = EXPERTS // len(axes)

    def rank_runs(rank: int) -> None:
        def layer(own: Tensor, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            there = exchanges[rank].there(hidden, index, weights)
            begin = rank * count
            assert len(there[0]), "experts see nothing"
            assert not exchanges[rank].exact or ((there[1] >= begin) & (there[1] < begin + count)).all()
            return exchanges[rank].back(experts(own, begin, *there))

        found[rank] = run(layer, weight[rank * count : (rank + 1) * count], *given[rank])

    threads = [threading.Thread(target=rank_runs, args=(rank,)) for rank in range(len(axes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("lengths", [(4, 4), (7, 2), (0, 5), (0, 0), (3, 0, 6, 1), (5, 5, 5, 5)], ids=str)
def test_either_exchange(monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], route: str) -> None:
    """The static one needs equally many tokens on each rank. Twice, the same bits."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from architectures import ThreadAxis

    ranks, barrier, slots = len(lengths), threading.Barrier(len(lengths)), [None] * len(lengths)
    axes = [ThreadAxis(rank, slots, barrier) for rank in range(ranks)]
    torch.manual_seed(0)
    weight = torch.randn(EXPERTS, WIDTH, WIDTH)
    given = [
        [torch.randn(length, WIDTH), ROUTES[route](rank, length), torch.rand(length, CHOSEN)]
        for rank, length in enumerate(lengths)
    ]
    whole = [run(lambda *all_experts: experts(all_experts[0], 0, *all_experts[1:]), weight, *each) for each in given]
    of_experts = torch.stack([each[1] for each in whole]).sum(0).chunk(ranks)
    expected = [[each[0], mine, *each[2:]] for each, mine in zip(whole, of_experts, strict=True)]
    kinds: list[Any] = [lambda axis: RoutedTokens(axis, EXPERTS // ranks, range(ranks))] * 2
    found = []
    for kind in [*kinds, *([GatheredTokens] if len(set(lengths)) == 1 and lengths[0] else [])]:
        found.append(over_ranks(axes, [kind(axis) for axis in axes], weight, given))
        torch.testing.assert_close(found[-1], expected, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
