"""How tokens of data parallel ranks reach the ranks that hold their experts, and how outputs come back.

| exchange         | devices | there      | back           | a rank's experts see                  |
| ---------------- | ------- | ---------- | -------------- | ------------------------------------- |
| `GatheredTokens` | lazy    | all-gather | reduce-scatter | all tokens of the group, masked       |
| `RoutedTokens`   | eager   | all-to-all | all-to-all     | the tokens that have chosen one of them |

Either brings experts hidden states, (tokens, hidden), with the chosen experts and their weights, (tokens, k), and adds
what comes back to one output for each of this rank's tokens. Gradients take the same ways in the other direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional as F

from stepmark.parallel.tensor.autograd_collectives import exchange, gather_partial, reduce_scatter
from stepmark.runtime.collectives import Collectives, GroupCollectives
from stepmark.runtime.mesh import Mesh

NOBODY = -1
"""The expert of a place where none is chosen."""


def token_exchange(mesh: Mesh, experts: int, holders: Sequence[int]) -> GatheredTokens | RoutedTokens:
    """The one of a module of experts on this device. `holders`: which part of the experts each rank of `mesh.experts`
    holds, of parts of `experts` experts each."""
    if mesh.runtime.lazy:
        return GatheredTokens(mesh.experts)
    return RoutedTokens(cast(GroupCollectives, mesh.experts), experts, holders)


class GatheredTokens:
    """Every rank sees all tokens of the group, so that shapes are static. All ranks have equally many."""

    exact = False  # whether experts see only tokens that have chosen them

    def __init__(self, axis: Collectives) -> None:
        self._axis = axis

    def there(self, hidden: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The hidden states that this rank's experts see, and their routing; never without a row. Collective."""
        (index,) = self._axis.all_gather([index])
        return gather_partial(hidden, self._axis, 0), index, gather_partial(weights, self._axis, 0)

    def back(self, output: Tensor) -> Tensor:
        """The sums of outputs, (tokens, hidden), of this rank's own tokens. Collective."""
        return reduce_scatter(output, self._axis, 0)


class RoutedTokens:
    """A token is sent once to each rank that holds some of its experts, which sends one sum back. Experts see a row for
    each pair of a token and one of them. The host reads the numbers of rows, once a call."""

    exact = True

    def __init__(self, axis: GroupCollectives, experts: int, holders: Sequence[int]) -> None:
        self._axis = axis
        self._experts = experts
        self._holders = holders
        self._route: _Route | None = None
        self._row_of_pair: Tensor | None = None

    def there(self, hidden: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        route = self._route = _Route(self._axis, index, self._experts, self._holders)
        hidden, weights = exchange([hidden, weights], route.send, route.take_back)
        (index,) = route.send([index])
        begin = self._holders[self._axis.rank] * self._experts
        if not route.pairs:  # experts that see nothing still have a gradient, and take part in its exchange
            hidden, weights = (F.pad(each, (0, 0, 0, 1)) for each in (hidden, weights))
            index = F.pad(index, (0, 0, 0, 1), value=begin)
        elsewhere = (index < begin) | (index >= begin + self._experts)
        order = index.masked_fill(elsewhere, begin + self._experts).flatten().argsort(stable=True)
        pairs = order[: max(route.pairs, 1)]
        self._row_of_pair = pairs.div(index.shape[1], rounding_mode="floor")
        return hidden[self._row_of_pair], index.flatten()[pairs, None], weights.flatten()[pairs, None]

    def back(self, output: Tensor) -> Tensor:
        route, rows = self._route, self._row_of_pair
        self._route = self._row_of_pair = None
        assert route is not None
        assert rows is not None
        precise = output.to(torch.promote_types(output.dtype, torch.float32))
        sums = _sums(precise, rows, max(sum(route.received), 1)).to(output.dtype)
        (own,) = exchange([sums[: sum(route.received)]], route.take_back, route.send)
        return own


class _Route:
    """Which tokens go to which ranks: how many rows are `sent` to each rank, and `received` from each, and how many
    `pairs` of a token and one of this rank's experts arrive."""

    def __init__(self, axis: GroupCollectives, index: Tensor, experts: int, holders: Sequence[int]) -> None:
        self._axis = axis
        self._length = len(index)
        parts = torch.tensor(holders, device=index.device)
        chosen = index.div(experts, rounding_mode="floor")[..., None] == parts  # (tokens, k, ranks)
        wanted = chosen.any(1).T
        self.sent, self.received, self.pairs = self._counts(torch.stack([wanted.sum(1), chosen.sum((0, 1))], 1), index)
        flat = wanted.flatten()
        total = sum(self.sent)
        rows = torch.where(flat, flat.cumsum(0) - 1, total)
        numbers = torch.arange(self._length, device=index.device).repeat(axis.size)
        self._tokens = numbers.new_empty(total + 1).scatter_(0, rows, numbers)[:total]  # of each row that is sent

    def _counts(self, own: Tensor, index: Tensor) -> tuple[list[int], list[int], int]:
        """Those of the attributes, from this rank's rows and pairs for each rank."""
        ones = [1] * self._axis.size
        (of_others,) = self._axis.all_to_all([own], ones, ones)
        if is_fake(own):  # means are not larger, however tokens are routed
            rows = [-(-len(index) * min(len(ones), index.shape[1]) // len(ones))] * len(ones)
            return rows, rows, index.numel()
        sent, received = torch.stack([own, of_others]).tolist()
        return [rows for rows, _ in sent], [rows for rows, _ in received], sum(pairs for _, pairs in received)

    def send(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The rows that arrive here, of tensors with a row for each token."""
        return self._axis.all_to_all([each[self._tokens] for each in tensors], self.sent, self.received)

    def take_back(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The transpose: for each token the sum of its rows that come back."""
        arrived = self._axis.all_to_all(tensors, self.received, self.sent)
        return [_sums(each, self._tokens, self._length) for each in arrived]


def _sums(rows: Tensor, index: Tensor, length: int) -> Tensor:
    """For each of `length` numbers the sum of the rows with that number in `index`, always in the same order."""
    return rows.new_zeros(length, rows.shape[1]).index_put((index,), rows, accumulate=True)
