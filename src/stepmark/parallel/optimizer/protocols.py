"""What a training step needs of an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from stepmark.parallel.gradients.reducer import GradientReducer
from stepmark.parallel.optimizer.arrivals import Arrivals
from stepmark.runtime.mesh import Mesh


class StepOptimizer(Protocol):
    """The optimizer of a training step.

    Attributes:
        inner: The `torch.optim` optimizer that computes the update. Learning rate schedules and callbacks work on its
            parameter groups.
        arrivals: What `step` has left to wait for.
    """

    inner: torch.optim.Optimizer
    arrivals: Arrivals

    def gradients(self, mesh: Mesh, *, accumulation: int, reduce_dtype: torch.dtype = torch.float32) -> GradientReducer:
        """Makes the reducer whose gradients `set_gradients` takes: only the optimizer knows which tensors it updates.
        `accumulation` is the number of micro-batches in a step, `reduce_dtype` the type in which data parallel ranks of
        an eager device send each other gradients."""

    def set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Sets the reduced gradients, or clears them with None. Separate from `step`, so that callbacks can read them
        before the update."""

    def step(self) -> None:
        """Updates the parameters on all ranks. Collective. With `arrivals.defer`, new values may arrive later."""

    def ensure_state(self) -> None:
        """Creates the state that the first step would create, so that a checkpoint can be restored in place."""
