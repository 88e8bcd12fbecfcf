"""The loads of a mixture's experts between two logs: how evenly routers divide the tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class ExpertLoadMeter:
    """Tokens of each expert of each layer since the last log, as state that is saved.

    `experts`: their number in every layer, by the name of the experts' module.
    """

    def __init__(self, experts: Mapping[str, int]) -> None:
        self._experts = dict(experts)
        self._sums = torch.zeros(sum(experts.values()), dtype=torch.int64)

    def add(self, loads: Tensor | None) -> None:
        """Adds a step's `StepStatistics.expert_loads`, on the host."""
        if loads is not None:
            self._sums += loads.to(torch.int64)

    def take(self) -> dict[str, Tensor]:
        """The tokens of each expert since the last call, by layer; layers without any are left out."""
        rows = self._sums.split(list(self._experts.values())) if self._experts else ()
        taken = {name: row for name, row in zip(self._experts, rows, strict=True) if row.any()}
        self._sums = torch.zeros_like(self._sums)
        return taken

    def state_dict(self) -> list[int]:
        tokens: list[int] = self._sums.tolist()
        return tokens

    def load_state_dict(self, tokens: list[int]) -> None:
        self._sums = torch.tensor(tokens, dtype=torch.int64)


def load_fields(loads: Mapping[str, Tensor]) -> tuple[dict[str, float], dict[str, Any]]:
    """What is logged of loads that `take` has returned: the fields over all layers, and those of each layer."""
    if not loads:
        return {}, {}
    each = {name: _spread(row.double()) for name, row in loads.items()}
    lows, highs, entropies = zip(*each.values(), strict=True)
    mean = math.fsum(entropies) / len(entropies)
    over_all = {"expert_load_min": min(lows), "expert_load_max": max(highs), "expert_load_entropy": mean}
    return over_all, {"expert_loads": {name: list(values) for name, values in each.items()}}


def _spread(row: Tensor) -> tuple[float, float, float]:
    """The smallest and the largest load in multiples of the mean, and the entropy of the loads in units of its
    maximum, which is that of equal loads."""
    shares = row / row.sum()
    entropy = -torch.special.xlogy(shares, shares).sum() / math.log(len(row)) if len(row) > 1 else torch.ones(())
    return float(shares.min() * len(row)), float(shares.max() * len(row)), float(entropy)
