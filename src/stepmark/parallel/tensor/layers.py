"""Linear layers sharded by columns or rows, and the regions between them.

A region is a module (attention, a feed-forward network) with sharded children, in which each rank computes its own
heads or hidden units. Children with the same input share one `copy_to`, hence one all-reduce in the backward pass.
Under sequence parallelism its input may have been gathered so that this sums already, and its output may be reduced and
scattered (sequence.py). LoRA adapters are sharded with their layer (adapted_layers.py).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from stepmark.errors import UsageError
from stepmark.parallel.tensor.adapted_layers import AdaptedLayer
from stepmark.parallel.tensor.autograd_collectives import copy_to, gather, reduce_from, reduce_scatter, scatter
from stepmark.parallel.tensor.dropout import RegionSeeds
from stepmark.parallel.tensor.sequence import SEQUENCE_DIM, SequenceBlock
from stepmark.runtime.collectives import Collectives


class TensorParallelRegion:
    """The sharded children of one module; `number` identifies the region within the model. `block`: what the module is
    under sequence parallelism, if it is a block."""

    def __init__(
        self, module: nn.Module, axis: Collectives, seeds: RegionSeeds, number: int, block: SequenceBlock | None
    ) -> None:
        self.axis = axis
        self._seeds = seeds
        self._number = number
        self._partial = block is not None and block.partial
        self._scatters = block is not None and block.scatters
        self._inside = False
        self._input: Tensor | None = None
        self._copy: Tensor | None = None
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end, always_call=True)

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._inside = True

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside = False
        self._input = self._copy = None

    def enter(self, module: nn.Module, tensor: Tensor, sharded: bool) -> Tensor:
        """The input of a child sharded by columns; `sharded`: whether its output stays sharded."""
        if self._copy is not None and self._input is tensor:
            return self._copy
        copy = tensor if self._partial else copy_to(tensor, self.axis)
        if sharded:
            self._seeds.sharded(module, self._number)
        if self._inside:
            self._input, self._copy = tensor, copy
        return copy

    def leave(self, module: nn.Module, partial: Tensor) -> Tensor:
        """The sum over the ranks of the outputs of a child sharded by rows."""
        if self._scatters:
            return reduce_scatter(partial, self.axis, SEQUENCE_DIM)
        self._seeds.replicated(module, self._number)
        return reduce_from(partial, self.axis)

    def drop_equally(self, dropout: nn.Module, place: str, sharded: bool) -> None:
        """Makes a dropout inside the region, whose input is replicated, draw equal numbers on all ranks. `place`:
        distinguishes it from others in the region; `sharded`: whether the computations that follow are sharded."""
        dropout.register_forward_pre_hook(lambda module, args: self._seeds.replicated(module, self._number, place))
        if sharded or self._partial:
            dropout.register_forward_hook(lambda module, *_: self._seeds.sharded(module, self._number, place))

    def drop_apart(self, dropout: nn.Module, place: str) -> None:
        """Makes a dropout, whose input is sharded, draw other numbers on each rank; `leave` ends that."""
        if not self._partial:  # else the numbers in use differ between the ranks already
            dropout.register_forward_pre_hook(lambda module, args: self._seeds.sharded(module, self._number, place))


class RowParallelLinear(nn.Linear):
    """A linear layer sharded along its inputs; the bias is added to the sum."""

    region: TensorParallelRegion

    def forward(self, input: Tensor) -> Tensor:
        return _biased(self.region.leave(self, F.linear(input, self.weight)), self.bias)


class RowParallelConv1D(nn.Module):
    """The same for transformers' Conv1D, whose weight is (inputs, outputs)."""

    region: TensorParallelRegion
    weight: Tensor
    bias: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return _biased(self.region.leave(self, input @ self.weight), self.bias)


def _biased(output: Tensor, bias: Tensor | None) -> Tensor:
    return output if bias is None else output + bias.to(output.dtype)


def input_dim(module: nn.Module) -> int:
    """The weight's input dim; raises UsageError for a module that is not a linear layer."""
    if isinstance(module, nn.Linear):
        return 1
    if _is_transposed(module):
        return 0
    raise UsageError(f"plan: {type(module).__name__} is not a linear layer, and only those have columns and rows")


def _is_transposed(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D)


def shard_columns(adapted: AdaptedLayer, region: TensorParallelRegion, gather_output: bool) -> None:
    """Adds a linear layer, whose parameters are sharded along their outputs, to a region, with its adapters."""
    adapted.called.register_forward_pre_hook(
        lambda module, args: (region.enter(module, args[0], not gather_output), *args[1:])
    )
    if gather_output:
        adapted.called.register_forward_hook(lambda module, args, output: gather(output, region.axis, -1))
    _set_widths(adapted.layer, outputs=True)
    for adapter in adapted.adapters:
        _set_widths(adapter.b, outputs=True)
        if not isinstance(adapter.dropout, nn.Identity):
            region.drop_equally(adapter.dropout, f"{adapted.name}.{adapter.name}", not gather_output)


def shard_rows(adapted: AdaptedLayer, region: TensorParallelRegion, split_input: bool) -> None:
    """Adds a linear layer, whose weight is sharded along its inputs, to a region, with its adapters."""
    if split_input:
        adapted.called.register_forward_pre_hook(lambda module, args: (scatter(args[0], region.axis, -1), *args[1:]))
    _sum_output(adapted.layer, region)
    for adapter in adapted.adapters:
        _sum_output(adapter.a, region)
        if not isinstance(adapter.dropout, nn.Identity):
            region.drop_apart(adapter.dropout, f"{adapted.name}.{adapter.name}")


def _sum_output(module: nn.Module, region: TensorParallelRegion) -> None:
    """Makes a linear layer, whose weight is sharded along its inputs, sum its output over the ranks."""
    become(module, RowParallelConv1D if _is_transposed(module) else RowParallelLinear)
    object.__setattr__(module, "region", region)
    _set_widths(module, outputs=False)


def _set_widths(module: nn.Module, outputs: bool) -> None:
    """Updates the layer's own width attributes, which repr() shows and Conv1D uses."""
    for name in ("out_features", "nf") if outputs else ("in_features", "nx"):
        if hasattr(module, name):
            weight: Any = module.weight
            setattr(module, name, weight.shape[1 - input_dim(module) if outputs else input_dim(module)])


def become(module: nn.Module, kind: type[nn.Module]) -> None:
    """Replaces the module's forward by that of `kind`; a subclass of `kind`'s base keeps what its own forward adds."""
    own = type(module)
    bases = (kind,) if kind.__bases__[0] is own else (own, kind)
    if kind is RowParallelConv1D:
        bases = (kind, own)
    module.__class__ = type(f"Parallel{own.__name__}", bases, {})
