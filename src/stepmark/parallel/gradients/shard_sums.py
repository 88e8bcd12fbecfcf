"""Where gradients are summed with sharded parameters: this rank's shard of each, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from stepmark.errors import UsageError
from stepmark.parallel.full_sharding import HOOKS, has_hooks, layer_of
from stepmark.parallel.gradients.hooks import GradientHooks
from stepmark.runtime.collectives import GroupCollectives, RankWeights

PIECES, BITS = 3, 12  # of a number that ranks compare: sums of pieces are exact in float32


class ShardSums:
    """One float32 tensor a parameter, of this rank's shard of its mean gradient.

    Each layer's gradients are reduced in every backward pass: kept for the last one, they would be complete on each
    rank. So what arrives is weighted by the ranks' tokens already.

    Args:
        parameters: Those that `shard_fully` has sharded, in the order of `tensors`.
        axis: The data parallel ranks.
        reduce_dtype: In which they send each other gradients.

    Attributes:
        hooks: What sees gradients arrive.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], axis: GroupCollectives, reduce_dtype: torch.dtype) -> None:
        self.parameters = list(parameters)
        self._axis = axis
        self._sums: list[Tensor | None] = [None] * len(self.parameters)
        self._arrived: list[int] = []
        self._known: set[int] = set()  # orders of arrival that were the same on all ranks
        self._layers = {id(layer): layer for layer in map(layer_of, self.parameters)}.values()
        for layer in self._layers:
            layer.dtype = reduce_dtype
        self._hook()

    def _hook(self) -> None:
        """Sees the gradients of all parameters that require one by now."""
        self._hooked = [index for index, each in enumerate(self.parameters) if each.requires_grad]
        self.hooks = GradientHooks(self, [self.parameters[index] for index in self._hooked], ShardSums._made)

    @property
    def copies(self) -> int:
        """The ranks that hold the same shards."""
        return next(iter(self._layers)).copies

    def begin(self, tokens: Tensor) -> None:
        """Tells the other ranks this one's target tokens in the step.

        Raises:
            UsageError: Somebody has set a gradient, or registered hooks, which would have no effect.
        """
        self.collect()
        hooked = set(self._hooked)
        for index, each in enumerate(self.parameters):
            if has_hooks(each, own=index in hooked):
                raise UsageError(f"fsdp: a parameter of shape {list(each.shape)} has a hook of its gradient, {HOOKS}")
        if any(each.requires_grad and index not in hooked for index, each in enumerate(self.parameters)):
            self._hook()
        weights = RankWeights(tokens, self._axis)
        weights.own()  # here, since torch's backward pass has streams of its own
        for layer in self._layers:
            layer.shares = weights

    def _made(self, hooked: int) -> None:
        """A gradient was reduced."""
        index = self._hooked[hooked]
        parameter, total = self.parameters[index], self._sums[index]
        part = layer_of(parameter).take(parameter)
        self._sums[index] = part if total is None else total.add_(part)
        self._arrived.append(index)
        parameter.grad = None

    def collect(self) -> None:
        """Raises UsageError where somebody has set a gradient, which would have no effect."""
        given = next((each for each in self.parameters if each.grad is not None), None)
        if given is not None:
            raise UsageError(
                f"fsdp: the gradient of a parameter of shape {list(given.shape)} was set, which has no effect; change "
                "gradients in on_pre_optimizer_step"
            )

    def tensors(self) -> list[Tensor | None]:
        """The mean of each parameter's gradient over all ranks, in this rank's shard; None where it has none."""
        return list(self._sums)

    def order(self) -> list[float]:
        """Numbers that say which gradients have arrived in the step, and in which order."""
        number = self._number()
        return [float(number >> piece * BITS & (1 << BITS) - 1) for piece in range(PIECES)]

    def _number(self) -> int:
        return crc32(repr(self._arrived).encode())

    def check(self, total: Tensor) -> None:
        """Raises UsageError where other gradients arrived on other ranks. `total`: what `order` gives, summed over the
        ranks. It is read where the order is new on this rank, so that nothing waits for the device in most steps."""
        number = self._number()
        if number in self._known or is_fake(total):
            return
        if self._axis.read(total) != [self._axis.size * each for each in self.order()]:
            raise UsageError(
                "fsdp: the ranks have gradients of different parameters, which fully_shard cannot reduce; use zero_1, "
                "or let every parameter take part in each loss"
            )
        self._known.add(number)

    def reset(self) -> None:
        """Forgets the sums, for the next step."""
        self._sums = [None] * len(self.parameters)
        self._arrived.clear()
        for parameter in self.parameters:
            parameter.grad = None
        for layer in self._layers:
            layer.shares = None
