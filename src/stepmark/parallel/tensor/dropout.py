"""Random numbers of a tensor parallel model.

Where activations are the same on all ranks, dropout must drop the same; where each rank has its own part, it should
not. Both come from seeds set on the way: entering a region of sharded activations seeds from (the seed in force when
the model's forward began, the region's number, the rank), leaving it from the first two alone. A recomputation of a
region (gradient checkpointing) passes the same places, so it draws the same numbers. Seeds are data to a lazy device.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from stepmark.runtime.base import Runtime
from stepmark.runtime.seeds import derive_seed


class RegionSeeds:
    """Sets the device's generator at the borders of sharded regions, while training a model that has dropout."""

    def __init__(self, runtime: Runtime, rank: int, enabled: bool) -> None:
        self._runtime = runtime
        self._rank = rank
        self._enabled = enabled
        self._base = 0

    def begin(self, model: nn.Module) -> None:
        """At the start of the model's forward: the seed that is in force belongs to this micro-step."""
        if self._enabled and model.training:
            self._base = self._runtime.current_seed()

    def sharded(self, module: nn.Module, region: int) -> None:
        """What follows works on this rank's own activations."""
        if self._enabled and module.training:
            self._runtime.seed(derive_seed(self._base, region, "rank", self._rank))

    def replicated(self, module: nn.Module, region: int) -> None:
        """What follows works on activations that all ranks have."""
        if self._enabled and module.training:
            self._runtime.seed(derive_seed(self._base, region))


def has_dropout(model: nn.Module) -> bool:
    """Whether training the model draws random numbers, as far as its modules and its configuration tell."""
    if any(getattr(module, "p", 0) for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd)):
        return True
    config: Any = getattr(model, "config", None)
    return config is not None and _any_dropout(config.to_dict())


def _any_dropout(values: dict[Any, Any]) -> bool:
    for name, value in values.items():
        if isinstance(value, dict) and _any_dropout(value):
            return True
        if isinstance(name, str) and ("drop" in name or "jitter" in name) and isinstance(value, float) and value > 0:
            return True
    return False
