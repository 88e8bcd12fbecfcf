"""The parts of a training step that report to an allocation tracker where the step is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from stepmark.parallel.gradients.reduced import ReducedGradients
from stepmark.parallel.gradients.reducer import GradientReducer
from stepmark.parallel.optimizer.protocols import StepOptimizer
from stepmark.preflight.plan.allocations import ACTIVATIONS, COMMUNICATION, GRADIENTS, AllocationTracker
from stepmark.runtime.mesh import Mesh
from stepmark.training.loss import MicroBatchLoss, Weight


class WatchedLoss(MicroBatchLoss):
    """A loss whose forward passes, and what follows them, are windows of the tracker."""

    def __init__(self, model: nn.Module, tracker: AllocationTracker, *, label_smoothing: float) -> None:
        super().__init__(model, label_smoothing=label_smoothing, lazy=True)  # reads no values
        self._tracker = tracker

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any], weight: Weight) -> tuple[Tensor, Any]:
        number = self._tracker.count("forward pass")
        self._tracker.enter(f"forward pass {number}", ACTIVATIONS)
        result = super().__call__(model, inputs, weight)
        self._tracker.enter(f"backward pass {number}", ACTIVATIONS)
        return result


class WatchedOptimizer:
    """A `StepOptimizer` whose gradients and update are windows of the tracker."""

    def __init__(self, optimizer: StepOptimizer, parameters: Iterable[nn.Parameter], tracker: AllocationTracker):
        self.inner: torch.optim.Optimizer = optimizer.inner
        self.arrivals = optimizer.arrivals
        self._optimizer, self._parameters, self._tracker = optimizer, list(parameters), tracker

    def gradients(self, mesh: Mesh, *, accumulation: int, reduce_dtype: torch.dtype = torch.float32) -> GradientReducer:
        with self._tracker.within(GRADIENTS):
            reducer = self._optimizer.gradients(mesh, accumulation=accumulation, reduce_dtype=reduce_dtype)
        return cast(GradientReducer, WatchedGradients(reducer, self._parameters, self._tracker))

    def set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        self._optimizer.set_gradients(gradients)

    def step(self) -> None:
        self._tracker.enter("update", COMMUNICATION)
        self._optimizer.step()

    def ensure_state(self) -> None:
        self._optimizer.ensure_state()


class WatchedGradients:
    """A `GradientReducer` that tells the tracker which memory holds gradients."""

    def __init__(self, reducer: GradientReducer, parameters: list[nn.Parameter], tracker: AllocationTracker) -> None:
        self._reducer, self._parameters, self._tracker = reducer, parameters, tracker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def collect(self) -> None:
        self._assign()
        self._reducer.collect()

    def reduce(self, loss: Tensor, tokens: Tensor) -> ReducedGradients:
        self._assign()
        self._tracker.enter("gradient reduction", COMMUNICATION)
        return self._reducer.reduce(loss, tokens)

    def _assign(self) -> None:
        self._tracker.assign((parameter.grad for parameter in self._parameters), GRADIENTS)
