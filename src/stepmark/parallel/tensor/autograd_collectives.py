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

A tensor is replicated (the same on all ranks, and so is its gradient), partial (its value is the sum over the ranks) or
sharded along a dim. `gather` is for a result whose gradient is then replicated, `gather_partial` for one whose gradient
is partial. A sharded dim has one equal shard per rank.
"""

# autograd.Function's own signatures are loose: mypy cannot follow them.
# mypy: disable-error-code="override, no-untyped-call, no-any-return"

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from stepmark.runtime.collectives import Collectives


def copy_to(tensor: Tensor, axis: Collectives) -> Tensor:
    """A replicated tensor, for use by computations that differ among ranks and produce partial gradients."""
    return _CopyTo.apply(tensor, axis)


def reduce_from(tensor: Tensor, axis: Collectives) -> Tensor:
    """The sum of a partial tensor, replicated. The result may reuse the memory of `tensor`."""
    return _ReduceFrom.apply(tensor, axis)


def gather(tensor: Tensor, axis: Collectives, dim: int) -> Tensor:
    """The complete tensor of shards along `dim`, replicated."""
    return _Gather.apply(tensor, axis, dim)


def scatter(tensor: Tensor, axis: Collectives, dim: int) -> Tensor:
    """This rank's shard along `dim` of a replicated tensor."""
    return _Scatter.apply(tensor, axis, dim)


def gather_partial(tensor: Tensor, axis: Collectives, dim: int) -> Tensor:
    """Like `gather`, for use by computations that differ among ranks and produce partial gradients."""
    return _GatherPartial.apply(tensor, axis, dim)


def reduce_scatter(tensor: Tensor, axis: Collectives, dim: int) -> Tensor:
    """This rank's shard along `dim` of the sum of a partial tensor."""
    return _ReduceScatter.apply(tensor, axis, dim)


class _CopyTo(Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, axis: Collectives) -> Tensor:
        context.axis = axis
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return context.axis.all_reduce([gradient])[0], None


class _ReduceFrom(Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, axis: Collectives) -> Tensor:
        return axis.all_reduce([tensor.detach()])[0]

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, axis: Collectives, dim: int) -> Tensor:
        context.axis, context.dim = axis, dim
        return axis.all_gather([tensor.detach()], dim)[0].contiguous()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return context.axis.own_shard(gradient, context.dim), None, None


class _Scatter(Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, axis: Collectives, dim: int) -> Tensor:
        context.axis, context.dim = axis, dim
        return axis.own_shard(tensor.detach(), dim).contiguous()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return context.axis.all_gather([gradient], context.dim)[0], None, None


class _GatherPartial(_Gather):
    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return context.axis.reduce_scatter([gradient], context.dim)[0], None, None


class _ReduceScatter(_Scatter):
    @staticmethod
    def forward(context: Any, tensor: Tensor, axis: Collectives, dim: int) -> Tensor:
        context.axis, context.dim = axis, dim
        return axis.reduce_scatter([tensor.detach()], dim)[0].contiguous()
