"""Losses of a run, and loads of its experts, between logs and since its beginning."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stepmark.runtime.base import Runtime
from stepmark.training.step import StepStatistics


def load_fields(loads: Mapping[str, Tensor]) -> tuple[dict[str, float], dict[str, Any]]:
    """What is logged of loads that `take_loads` has returned: the fields over all layers, and those of each layer."""
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


HELD_STEPS = 512  # steps whose statistics may stay on the device


@dataclass(eq=False)
class LossMeter:
    """Losses since the last log and since the run began, weighted by tokens, and tokens of experts since the last log,
    as state that is saved.

    Statistics stay on the device until they are needed, so that a step never waits. A float32 loss times a token
    count is exact in the host's float64, so the mean of one step is that step's loss to the last bit.

    `look(step, loss, tokens, gradient norm, updated, learning rate)` is called once the numbers of a step are on the
    host. `experts`: their number in every layer, by the name of the experts' module. `filters`: a loss that is not
    finite counts as the mean so far.
    """

    runtime: Runtime
    look: Callable[..., None] = lambda *_: None
    experts: Mapping[str, int] = field(default_factory=dict)
    filters: bool = False

    def __post_init__(self) -> None:
        self._pending: list[tuple[StepStatistics, float]] = []
        self._loads = torch.zeros(sum(self.experts.values()), dtype=torch.int64)
        self.since_log = {"loss": 0.0, "tokens": 0}
        self.since_start = {"loss": 0.0, "tokens": 0}
        self.grad_norm = 0.0
        self.last_loss: float | None = None
        self.timed_tokens = 0  # trained by this process since its caller set it to 0

    def add(self, statistics: StepStatistics, rate: float = 0.0) -> None:
        """Takes a step's statistics; `rate`: its learning rate."""
        self._pending.append((statistics, rate))
        if len(self._pending) >= HELD_STEPS:
            self.settle()

    def settle(self) -> None:
        """Copies the pending statistics from the device."""
        fetched = self._fetch([each.values for each, _ in self._pending])
        counted = [each.expert_loads for each, _ in self._pending if each.expert_loads is not None]
        for loads in self._fetch(counted) if counted else ():
            self._loads += loads.to(torch.int64)
        for (statistics, rate), values in zip(self._pending, fetched, strict=True):
            loss, tokens, self.grad_norm = values.tolist()
            self.look(statistics.step + 1, loss, tokens, self.grad_norm, statistics.updated, rate)
            lost = self.filters and not math.isfinite(loss)
            for sums in (self.since_log, self.since_start):
                sums["loss"] += tokens * (sums["loss"] / max(sums["tokens"], 1) if lost else loss)
                sums["tokens"] += int(tokens)
            self.timed_tokens += int(tokens)
            self.last_loss = self.last_loss if lost else loss
        self._pending.clear()

    def _fetch(self, values: list[Tensor]) -> list[Tensor]:
        """The vectors on the host, by one copy; a lazy device would run a graph to join them."""
        if self.runtime.lazy or len(values) < 2:
            return self.runtime.to_host(values)
        return list(self.runtime.to_host([torch.stack(values)])[0])

    def take_log(self) -> dict[str, Any] | None:
        """Mean loss since the last log and the last gradient norm; None if there was no step since."""
        self.settle()
        tokens = self.since_log["tokens"]
        if not tokens:
            return None
        log = {"loss": self.since_log["loss"] / tokens, "grad_norm": self.grad_norm}
        self.since_log = {"loss": 0.0, "tokens": 0}
        return log

    def take_loads(self) -> dict[str, Tensor]:
        """The tokens of each expert since the last call, by layer; layers without any are left out."""
        rows = self._loads.split(list(self.experts.values())) if self.experts else ()
        self._loads = torch.zeros_like(self._loads)
        return {name: row for name, row in zip(self.experts, rows, strict=True) if row.any()}

    def any_targets(self) -> bool:
        """Whether any step since the run began had a target; waits for the device only until one had."""
        if not self.since_start["tokens"]:
            self.settle()
        return self.since_start["tokens"] > 0

    def mean_loss(self) -> float:
        """Mean over all tokens since the run began, resumptions included; 0 before the first step."""
        self.settle()
        return self.since_start["loss"] / self.since_start["tokens"] if self.since_start["tokens"] else 0.0

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        sums = {"since_log": {**self.since_log}, "since_start": {**self.since_start}, "grad_norm": self.grad_norm}
        return {**sums, "expert_loads": self._loads.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pending.clear()
        self.since_log = dict(state["since_log"])
        self.since_start = dict(state["since_start"])
        self.grad_norm = state["grad_norm"]
        if state.get("expert_loads"):  # older checkpoints have none
            self._loads = torch.tensor(state["expert_loads"], dtype=torch.int64)
