"""What a training step needs of what reduces the gradients among ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class ReducedGradients:
    """The result of one step's backward passes over all ranks.

    Attributes:
        gradients: Mean gradients in the form that the optimizer's `set_gradients` takes: of complete parameters, or of
            this rank's shards. None where a parameter took no part.
        loss: Mean loss per target token, a 0-dim tensor on the device.
        tokens: Number of target tokens, a 0-dim float32 tensor on the device.
        norm: 2-norm of the complete model's gradient, a 0-dim float32 tensor on the device.
    """

    gradients: list[Tensor | None]
    loss: Tensor
    tokens: Tensor
    norm: Tensor


class GradientReducer(Protocol):
    """Turns the backward passes of one step into mean gradients over all ranks. Collective."""

    def begin(self, tokens: Tensor) -> None:
        """Announces the step, and this rank's target tokens in it: the value that `reduce` will be given. Optional, but
        on all ranks or none."""

    def last_backward(self) -> None:
        """Announces the step's last backward pass, so that communication may overlap with it; after `begin`."""

    def collect(self) -> None:
        """Adds what a backward pass left in `parameter.grad` to the step's sums; called after each of them."""

    def collect_one(self, parameter: Tensor) -> None:
        """Does the same for one parameter whose gradient is complete."""

    def collect_on_arrival(self) -> None:
        """From now on does so as soon as autograd has made a gradient."""

    def reduce(self, loss: Tensor, tokens: Tensor) -> ReducedGradients:
        """Reduces the sums over all ranks. `loss` (0-dim) is this rank's mean over its `tokens` (0-dim float32)."""

    def show(self, gradients: Sequence[Tensor | None]) -> Callable[[], None]:
        """Makes `parameter.grad` of fp32 parameters what `reduce` has made of it on all ranks, for callbacks; calling
        the result takes over what they have changed. Collective. On lazy devices ZeRO-1 shows nothing."""

    def reset(self) -> None:
        """Clears the sums for the next step."""

    def close(self) -> None:
        """Leaves gradients to autograd from now on; called after the last step."""
