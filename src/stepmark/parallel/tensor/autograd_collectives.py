"""Collectives with gradients.

The backward pass of each is the transpose of its forward pass:

| function         | forward                 | backward                |
| ---------------- | ----------------------- | ----------------------- |
| `copy_to`        | identity                | all-reduce              |
| `reduce_from`    | all-reduce              | identity                |
| `gather`         | all-gather              | own shard               |
| `scatter`        | own shard               | all-gather              |
| `gather_partial` | all-gather              | reduce-scatter          |
| `reduce_scatter` | reduce-scatter          | all-gather              |
| `exchange`       | as given                | as given                |

A tensor is replicated (the same on all ranks, and so is its gradient), partial (its value is the sum over the ranks) or
sharded along a dim. `gather` is for a result whose gradient is then replicated, `gather_partial` for one whose gradient
is partial. A sharded dim has one equal shard per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import Function

from stepmark.runtime.collectives import Collectives

Operations = Callable[[Sequence[Tensor]], list[Tensor]]


def copy_to(tensor: Tensor, axis: Collectives) -> Tensor:
    """A replicated tensor, for use by computations that differ among ranks and produce partial gradients."""
    (copy,) = exchange([tensor], lambda given: [given[0].view_as(given[0])], axis.all_reduce)
    return copy


def reduce_from(tensor: Tensor, axis: Collectives) -> Tensor:
    """The sum of a partial tensor, replicated. The result may reuse the memory of `tensor`."""
    return _apply(tensor, axis.all_reduce, list)


def gather(tensor: Tensor, axis: Collectives, dim: int) -> Tensor:
    """The complete tensor of shards along `dim`, replicated."""
    return _apply(tensor, partial(axis.all_gather, dim=dim), _own_shard(axis, dim))


def scatter(tensor: Tensor, axis: Collectives, dim: int) -> Tensor:
    """This rank's shard along `dim` of a replicated tensor."""
    return _apply(tensor, _own_shard(axis, dim), partial(axis.all_gather, dim=dim))


def gather_partial(tensor: Tensor, axis: Collectives, dim: int) -> Tensor:
    """Like `gather`, for use by computations that differ among ranks and produce partial gradients."""
    return _apply(tensor, partial(axis.all_gather, dim=dim), partial(axis.reduce_scatter, dim=dim))


def reduce_scatter(tensor: Tensor, axis: Collectives, dim: int) -> Tensor:
    """This rank's shard along `dim` of the sum of a partial tensor."""
    return _apply(tensor, partial(axis.reduce_scatter, dim=dim), partial(axis.all_gather, dim=dim))


def _own_shard(axis: Collectives, dim: int) -> Operations:
    return lambda given: [axis.own_shard(each, dim) for each in given]


def exchange(tensors: Sequence[Tensor], forward: Operations, backward: Operations) -> tuple[Tensor, ...]:
    """What `forward` makes of the tensors, one of each; gradients go through `backward`, all in one call."""
    return _Collective.apply(forward, backward, *tensors)


def _apply(tensor: Tensor, forward: Operations, backward: Operations) -> Tensor:
    (made,) = exchange([tensor], lambda given: [forward([given[0].detach()])[0].contiguous()], backward)
    return made


class _Collective(Function):
    """An operation, and the one that its gradients go through."""

    @staticmethod
    def forward(context: Any, forward: Operations, backward: Operations, *tensors: Tensor) -> tuple[Tensor, ...]:
        context.operation = backward
        return tuple(forward(tensors))

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *context.operation(gradients)
