"""Expert parallelism: each rank of a group holds some of the experts, and computes them for the tokens of all.

The group is neighbours on the tensor parallel axis, which have the same tokens; where these are too few, also
neighbours on the data parallel axis, which gather tokens and routing, and scatter the sums of outputs. All shapes are
static: what the router has chosen elsewhere is masked. If the tensor parallel axis is longer than the group, several
ranks hold the same experts, and each takes its part of the tokens.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional as F

from stepmark.errors import UsageError
from stepmark.parallel.architectures import EXPERT_PARALLEL
from stepmark.parallel.tensor.adapted_layers import is_wrapper
from stepmark.parallel.tensor.autograd_collectives import (
    copy_to,
    gather_partial,
    reduce_from,
    reduce_scatter,
    scale_gradient,
)
from stepmark.parallel.tensor.plans import Placement, expression, model_type, own_plan, shard
from stepmark.runtime.collectives import Collectives
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.replication import Replication

WITH_MASKS = ("grouped_mm", "batched_mm")
"""transformers' implementations of experts that skip what has the number after the last expert."""


class TokenShares:
    """This rank's share of the target tokens that a group's experts see in a step.

    A rank's loss is a mean over its own target tokens. A gradient is weighted by this share on its way to experts, so
    that a token counts once in their mean, wherever it comes from; on its way back it gets its own scale again.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._axis = ref(mesh.experts)  # whose it is
        self._size = mesh.experts.size
        self._lazy = mesh.runtime.lazy
        self._tokens: Tensor | None = None
        self._total: Tensor | None = None

    def begin(self, tokens: Tensor) -> Tensor:
        """Announces a step's target tokens (0-dim float32) before its first backward pass; without it all ranks count
        alike. Returns those of the group, on eager devices."""
        if self._size == 1:
            return tokens
        self._tokens, self._total = tokens, None
        return tokens if self._lazy else self.total()

    def total(self) -> Tensor:
        """The target tokens of the group."""
        axis = self._axis()
        assert self._tokens is not None
        assert axis is not None
        if self._total is None:
            (self._total,) = axis.all_reduce([self._tokens.clone()])
        return self._total

    def own(self) -> Tensor | float:
        """This rank's share."""
        return 1 / self._size if self._tokens is None else self._tokens / self.total().clamp(min=1)

    def end_micro_batch(self) -> None:
        """On a lazy device each micro-batch adds up the tokens anew, so that all of them have one graph."""
        if self._lazy:
            self._total = None

    def end(self) -> None:
        self._tokens = self._total = None


_shares: WeakKeyDictionary[Collectives, TokenShares] = WeakKeyDictionary()


def shares_of_tokens(mesh: Mesh) -> TokenShares:
    """Those of the ranks over which this mesh divides experts."""
    return _shares.setdefault(mesh.experts, TokenShares(mesh))


def expert_modules(model: Any, *, verified: bool) -> dict[str, Any]:
    """The modules of a transformers model whose experts can be divided, by name: those of its `ep_plan`, and others
    that tensor parallelism knows and that take hidden states, the chosen experts and their weights.

    Raises UsageError where there are none, where one is not as expected, and with `verified` for a model type that was
    not compared with one rank.
    """
    kind = model_type(model)
    plan = {**own_plan(model), **(getattr(model, "_ep_plan", None) or {})}
    patterns = [re.compile(expression(name)) for name, style in plan.items() if style in _STYLES]
    named = {name: each for name, each in model.named_modules() if any(p.fullmatch(name) for p in patterns)}
    found = {name: each for name, each in named.items() if is_wrapper(each) or _takes_routing(each)}
    if not found or (verified and kind not in EXPERT_PARALLEL):
        why = "was not compared with one rank" if found else "has no experts that can be divided over ranks"
        raise UsageError(f"expert_parallel_size: {kind} {why} (docs/tables.md); set it to 1")
    for name, module in found.items():
        _check(name, module)
    return found


_STYLES = ("ep_dispatch_experts", "moe_tp_experts")


def _takes_routing(module: nn.Module) -> bool:
    taken = list(inspect.signature(type(module).forward).parameters)[1:]
    return len(taken) == 3 and isinstance(getattr(module, "num_experts", None), int)


def _check(name: str, module: Any) -> None:
    if any(map(is_wrapper, module.modules())):
        raise UsageError(f"expert_parallel_size: {name} has an adapter, which cannot be divided; leave it out")
    direct = dict(module.named_parameters(recurse=False))
    other = [own for own, each in module.named_parameters() if own not in direct or each.shape[0] != module.num_experts]
    if other:
        raise UsageError(f"expert_parallel_size: {name}.{other[0]} is not divided by experts; set it to 1")


class ExpertParallelism:
    """The experts of one model on a mesh: the constructor checks everything, the other methods change the model.

    Attributes:
        modules: The modules that are divided, by name.
    """

    def __init__(self, model: Any, mesh: Mesh, *, verified: bool) -> None:
        self.modules = expert_modules(model, verified=verified)
        self._mesh = mesh
        size, tensor = mesh.expert_parallel_size, mesh.tensor_parallel
        self._copies = tensor.size * mesh.experts.size // size
        self._number = (mesh.experts.rank * tensor.size + tensor.rank) // self._copies
        for name, module in self.modules.items():
            if module.num_experts % size:
                raise UsageError(
                    f"expert_parallel_size: {name} has {module.num_experts} experts, which {size} ranks cannot divide "
                    "equally; choose a divisor"
                )

    def placements(self) -> Iterator[tuple[nn.Parameter, Placement, Replication]]:
        """This rank's experts of each parameter."""
        copies = Replication(self._copies, partial=self._copies > 1, experts=self._mesh.experts.size > 1)
        for module in self.modules.values():
            for parameter in module.parameters():
                yield parameter, shard(tuple(parameter.shape), 0, self._number, self._mesh.expert_parallel_size), copies

    def wire(self) -> None:
        """After the parameters were replaced."""
        for module in self.modules.values():
            module.num_experts //= self._mesh.expert_parallel_size
            _Dispatch(module, self._mesh, self._number, self._copies)


class _Dispatch:
    """Brings a module of experts the tokens of its group, and takes the sums of outputs back."""

    def __init__(self, module: Any, mesh: Mesh, number: int, copies: int) -> None:
        self._mesh = mesh
        self._copies = copies
        self._begin = number * module.num_experts
        self._copy = mesh.tensor_parallel.rank % copies
        self._shares = shares_of_tokens(mesh)
        self._placed: tuple[Tensor, Tensor] | None = None
        self._rows = 0
        enter, leave = self._enter, self._leave
        if mesh.experts.size > 1:  # a compiled backward pass would keep the shares of the step in which it was traced
            enter, leave = torch.compiler.disable(enter), torch.compiler.disable(leave)
        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave)

    def _enter(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        hidden, index, weights = inspect.signature(type(module).forward).bind(module, *args, **kwargs).args[1:]
        self._rows = len(hidden)
        tensor, axis = self._mesh.tensor_parallel, self._mesh.experts
        if tensor.size > 1:
            hidden, weights = copy_to(hidden, tensor), copy_to(weights, tensor)
        if axis.size > 1:
            rows = self._most_rows() - len(hidden)
            index = axis.all_gather([_padded(index, rows, -1)])[0]
            hidden, weights = (scale_gradient(each, self._to_own_scale) for each in (hidden, weights))
            hidden, weights = (gather_partial(_padded(each, rows, 0), axis, 0) for each in (hidden, weights))
        index, weights = self._own(module, index, weights)
        return (hidden, index, weights), {}

    def _most_rows(self) -> int:
        """Of all ranks in the group. A lazy device has one graph, so that all have as many."""
        runtime = self._mesh.runtime
        if runtime.lazy:
            return self._rows
        (most,) = self._mesh.experts.all_reduce([torch.tensor([self._rows], device=runtime.device)], "max")
        return self._rows if is_fake(most) else int(most)

    def _own(self, module: Any, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Masks what experts of other ranks compute, or other copies of these experts."""
        if self._placed is None:
            begin, copy = self._mesh.runtime.place([torch.tensor([self._begin]), torch.tensor([self._copy])])
            self._placed = begin, copy
        begin, copy = self._placed
        count = module.num_experts
        own = index - begin
        elsewhere = (own < 0) | (own >= count)
        if self._copies > 1:
            elsewhere |= (torch.arange(len(index), device=index.device) % self._copies != copy)[:, None]
        masks = hasattr(module, "_is_expert_parallel") and not self._mesh.runtime.lazy
        masks = masks and module.config._experts_implementation in WITH_MASKS
        module._is_expert_parallel = masks
        own = own.masked_fill(elsewhere, count) if masks else own.remainder(count)  # what has weight 0 adds nothing
        return own, weights.masked_fill(elsewhere, 0)

    def _leave(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        axis = self._mesh.experts
        if axis.size > 1:
            output = reduce_scatter(output, axis, 0)[: self._rows]
            output = scale_gradient(output, self._to_share)
        tensor = self._mesh.tensor_parallel
        return reduce_from(output.clone(), tensor) if tensor.size > 1 else output

    def _to_share(self, gradient: Tensor) -> Tensor:
        return gradient * self._shares.own()

    def _to_own_scale(self, gradient: Tensor) -> Tensor:
        share = self._shares.own()
        return gradient / (share.clamp(min=torch.finfo(share.dtype).tiny) if isinstance(share, Tensor) else share)


def _padded(tensor: Tensor, rows: int, value: int) -> Tensor:
    return F.pad(tensor, (0, 0, 0, rows), value=value) if rows else tensor
