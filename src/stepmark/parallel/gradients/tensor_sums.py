"""Where gradients are summed without data parallel ranks, and on a lazy device: one tensor a parameter."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stepmark.parallel.gradients.hooks import GradientHooks
from stepmark.runtime.base import Runtime


class TensorSums:
    """One float32 tensor a parameter, to which gradients are added after each backward pass.

    Without accumulation, fp32 gradients stay where autograd puts them. On a lazy device views of a bucket would be
    operations of the graph; persistent tensors make the graph of every micro-batch the same.

    Args:
        parameters: Whose gradients are summed, in the order of `tensors`.
        runtime: The device.
        accumulation: Micro-batches in a step.
        on_arrival: Add each gradient as soon as autograd has made it.
        watched: Note when gradients arrive, for `arrivals`.

    Attributes:
        arrivals: When the gradient of each parameter last arrived, in an order; -1: never.
        hooks: What sees gradients arrive.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        runtime: Runtime,
        *,
        accumulation: int,
        on_arrival: bool = False,
        watched: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        self._sums: list[Tensor] | None = None
        if (runtime.lazy and accumulation > 1) or any(each.dtype != torch.float32 for each in self.parameters):
            zeros = [torch.zeros(each.shape, dtype=torch.float32) for each in self.parameters]
            self._sums = list(runtime.place(zeros))
        self._on_arrival = on_arrival
        self._moments = itertools.count()
        self.arrivals = [-1] * len(self.parameters)
        hooked = range(len(self.parameters)) if on_arrival or watched else ()
        self._hooked = [index for index in hooked if self.parameters[index].requires_grad]
        self.hooks = GradientHooks(self, [self.parameters[index] for index in self._hooked], TensorSums._made)

    def _made(self, hooked: int) -> None:
        """Autograd has made a gradient."""
        index = self._hooked[hooked]
        self.arrivals[index] = next(self._moments)
        if self._on_arrival:
            self._collect(index)

    def collect(self) -> None:
        """Adds what a backward pass has left in `parameter.grad`."""
        for index in range(len(self.parameters)) if self._sums is not None else ():
            self._collect(index)

    def _collect(self, index: int) -> None:
        parameter = self.parameters[index]
        if self._sums is not None and parameter.grad is not None:
            with torch.no_grad():
                self._sums[index].add_(parameter.grad)
            parameter.grad = None

    def tensors(self) -> list[Tensor | None]:
        """The sum of each parameter's gradients; None where it has none."""
        return list(self._sums) if self._sums is not None else [each.grad for each in self.parameters]

    @torch.no_grad()
    def reset(self) -> None:
        """Clears the sums for the next step."""
        for parameter in self.parameters:
            parameter.grad = None
        for total in self._sums or ():
            total.zero_()
