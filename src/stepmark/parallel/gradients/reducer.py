"""Sums the gradients of a step over all ranks. The loss is divided before, by the targets of all of them.

Phases of a step: `begin`; `collect` after each backward pass, `last_backward` before the last one; `reduce`; `reset`.
Two choices make a reducer, where the fp32 sums live and what is sent:

|                           | `AllReduce`: means of all parameters | `ReduceScatter`: this rank's shards of them |
| ------------------------- | ------------------------------------ | ------------------------------------------- |
| `BucketAccumulator`:      | eager, several data parallel ranks   | eager, ZeRO-1                               |
| flat buckets              |                                      |                                             |
| `ParameterAccumulator`:   | one data parallel rank; lazy         | lazy, ZeRO-1                                |
| one tensor a parameter    |                                      |                                             |
| `ShardAccumulator`:       |                                      | sharded parameters (`ReducedShards`)        |
| one shard of a parameter  |                                      |                                             |

Flat buckets are sent while the last backward pass makes their gradients, tensors after it, and those of sharded
parameters, layer by layer, during every backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.errors import UsageError
from stepmark.parallel.gradients.accumulators import BucketAccumulator, ParameterAccumulator, ShardAccumulator
from stepmark.parallel.gradients.arithmetic import add_partial_of_buckets
from stepmark.parallel.gradients.exchange import AllReduce, ReducedShards
from stepmark.parallel.gradients.overlap import CHANGED, OverlappedReduction
from stepmark.parallel.gradients.reduced import ReducedGradients, expose_grads
from stepmark.runtime.collectives import GroupCollectives
from stepmark.runtime.mesh import Mesh


class GradientReducer:
    """Turns the backward passes of one step into mean gradients over all ranks. Collective. Gradients are added up in
    `sums`, and `exchange` sends them."""

    def __init__(
        self, sums: BucketAccumulator | ParameterAccumulator | ShardAccumulator, exchange: Any, mesh: Mesh
    ) -> None:
        self.sums = sums
        self._exchange = exchange
        self._mesh = mesh
        self._set_before: dict[nn.Parameter, Tensor] = {}  # for the other logical ranks of this process
        self._overlap: OverlappedReduction | None = None
        if isinstance(sums, BucketAccumulator) and isinstance(mesh.data_parallel, GroupCollectives):
            self._overlap = OverlappedReduction(sums, exchange.start, mesh.data_parallel, mesh.runtime.device)

    def begin(self) -> None:
        """Announces the step. Optional."""
        self._take_hooks()
        if isinstance(self.sums, ShardAccumulator):
            self.sums.begin()
            return
        ranks, self._set_before = self._mesh.ranks, {}
        for parameter in self.sums.parameters if ranks.total > 1 else ():
            if parameter.grad is not None:  # set before the step: it becomes that of all ranks, whose sum is their mean
                parameter.grad = parameter.grad / ranks.total
                if len(ranks.own) > 1:
                    self._set_before[parameter] = parameter.grad.clone()

    def _take_hooks(self) -> None:
        self.sums.hooks.check()
        self.sums.hooks.come_last()

    def last_backward(self) -> None:
        """Announces the step's last backward pass, which communication may overlap. On all ranks or none."""
        self._take_hooks()
        if self._overlap is not None:
            self._overlap.last_backward()

    @torch.no_grad()
    def collect(self) -> None:
        """Adds what a backward pass left in `parameter.grad` to the step's sums; called after each of them."""
        self.sums.collect()

    @property
    def by_pass(self) -> bool:
        """Whether gradients are added over all ranks in every pass; then `enter` is called before each."""
        return isinstance(self.sums, ShardAccumulator)

    def enter(self, place: int) -> None:
        """Begins a pass of the logical rank with the number `place` of each process, as far as it has one."""
        assert isinstance(self.sums, ShardAccumulator)
        self.sums.enter(place)

    @torch.no_grad()
    def end_rank(self) -> None:
        """Ends the backward passes of a logical rank of this process that is not its last."""
        if isinstance(self.sums, BucketAccumulator) and self._mesh.ranks.fixed:
            self._complete_partial(self.sums)
            self.sums.end_rank()
        for parameter, gradient in self._set_before.items():
            parameter.grad = gradient.clone()

    @torch.no_grad()
    def reduce(self, loss: Tensor, tokens: Tensor, loads: Tensor | None = None) -> ReducedGradients:
        """Reduces the sums over all ranks. `loss` has the part of each logical rank of this process in the mean over
        the `tokens` of all ranks (0-dim float32); `loads` are numbers of tokens to add up, a float32 vector, equal on
        tensor parallel ranks. Raises UsageError where gradients were changed after they were sent, which would have no
        effect."""
        self.sums.hooks.check()
        if loads is not None:
            (loads,) = self._mesh.data_parallel.all_reduce([loads])
        if not isinstance(self.sums, BucketAccumulator):
            return self._exchange.at_once(self.sums, loss, tokens, loads)
        if self._overlap is not None:
            self._overlap.check_unchanged()
        self._complete_partial(self.sums)
        if self._overlap is None:
            means = [self._exchange.start(self.sums, number)() for number in range(len(self.sums.buckets))]
        else:
            means = self._overlap.finish()
        return self._exchange.reduced(self.sums, means, loss, tokens, loads)

    def _complete_partial(self, sums: BucketAccumulator) -> None:
        """Completes the gradients of which tensor parallel neighbours have a part each."""
        if self._mesh.tensor_parallel.size > 1:
            flat = [sums.complete(number) for number in range(len(sums.buckets))]
            for own, total in zip(flat, add_partial_of_buckets(flat, sums.buckets, self._mesh), strict=True):
                if total is not own:
                    own.copy_(total)

    def expose_grads(self, reduced: ReducedGradients) -> Callable[[], ReducedGradients]:
        """Makes `parameter.grad` what `reduce` has made of it on all ranks, for callbacks; calling the result returns
        it with what they have changed. Collective. On lazy devices ZeRO-1 shows nothing."""
        return self._exchange.expose_grads(self.sums, reduced)

    @contextmanager
    def grads_exposed_so_far(self) -> Iterator[None]:
        """Inside the block, between two backward passes, `parameter.grad` is the sum so far; changes there count."""
        take = expose_grads(list(zip(self.sums.parameters, self.sums.tensors(), strict=True)))
        yield
        self.sums.replace(take())

    @contextmanager
    def grads_changeable(self, *, last: bool) -> Iterator[None]:
        """Inside the block, after a backward pass, what is changed of `parameter.grad` counts. Where the `last` one has
        sent them by then, it raises UsageError. Lazy devices show what the pass has made."""
        if self._mesh.runtime.lazy:
            yield
        elif not last or self._overlap is None:
            with self.grads_exposed_so_far():
                yield
        else:
            before = [parameter.grad for parameter in self.sums.parameters]
            yield
            if any(each.grad is not grad for each, grad in zip(self.sums.parameters, before, strict=True)):
                raise UsageError(CHANGED)

    def settle(self) -> None:
        """Raises UsageError where ranks have called other layers in the last step. Waits for the device."""
        if isinstance(self._exchange, ReducedShards):
            self._exchange.compare_last()

    def reset(self) -> None:
        """Clears the sums for the next step."""
        if self._overlap is not None:
            self._overlap.reset()
        if isinstance(self._exchange, AllReduce):
            self._exchange.wait()
        self.sums.reset()

    def close(self) -> None:
        """Leaves gradients to autograd from now on; called after the last step."""
        self.sums.hooks.close()
