"""Seeds the dropout of a tensor parallel model, so that ranks drop the same elements where activations are replicated.

Where activations are replicated, dropout must drop the same elements on all ranks; where they are sharded, it should
not. So the generator is seeded during the forward pass: on entering a region of sharded activations from (the seed in
force when the model's forward pass began, the region's number, the rank), on leaving it from the first two. Recomputing
a region (gradient checkpointing) runs the same hooks and therefore draws the same numbers; where other micro-batches
have begun in between, as in a pipeline, `begin_regions` goes back to the one whose backward pass follows. On a lazy
device seeds are data, not constants of the graph.
"""

from __future__ import annotations

import re
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from stepmark.runtime.base import Runtime
from stepmark.runtime.seeds import derive_seed


class RegionSeeds:
    """Seeds the device's generator at the boundaries of sharded regions, while a model with dropout is training."""

    def __init__(self, runtime: Runtime, rank: int, enabled: bool) -> None:
        self._runtime = runtime
        self._rank = rank
        self._enabled = enabled
        self._base = 0

    def begin(self, model: nn.Module) -> None:
        """Called when the model's forward pass begins: the seed in force is the micro-batch's."""
        if self._enabled and model.training:
            self._base = self._runtime.current_seed()

    def sharded(self, module: nn.Module, region: int, *place: str) -> None:
        """The following operations work on sharded activations. `place`: where in the region that is."""
        if self._enabled and module.training:
            self._runtime.seed(derive_seed(self._base, region, *place, "rank", self._rank))

    def replicated(self, module: nn.Module, region: int, *place: str) -> None:
        """The following operations work on replicated activations."""
        if self._enabled and module.training:
            self._runtime.seed(derive_seed(self._base, region, *place))


_of_models: WeakKeyDictionary[nn.Module, RegionSeeds] = WeakKeyDictionary()


def seed_regions(model: nn.Module, seeds: RegionSeeds) -> None:
    """Makes `seeds` begin with each forward pass of the model, or of a module by which it is called."""
    _of_models[model] = seeds
    model.register_forward_pre_hook(lambda module, args: seeds.begin(module))


def begin_regions(model: nn.Module) -> None:
    """Seeds the model's regions for the micro-batch whose seed is in force, as its forward pass has done, before a
    backward pass that may compute them again."""
    if model in _of_models:
        _of_models[model].begin(model)


def has_dropout(model: nn.Module) -> bool:
    """Whether training the model draws random numbers, judging by its modules and its configuration."""
    if any(getattr(module, "p", 0) for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd)):
        return True
    config: Any = getattr(model, "config", None)
    return config is not None and _any_dropout(config.to_dict())


def _any_dropout(values: dict[Any, Any]) -> bool:
    shares = [value for name, value in values.items() if re.search("drop|jitter", str(name))]
    return any(isinstance(share, float) and share > 0 for share in shares) or any(
        _any_dropout(value) for value in values.values() if isinstance(value, dict)
    )
