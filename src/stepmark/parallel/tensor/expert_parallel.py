"""Expert parallelism: each rank of a group holds some of the experts, and computes them for the tokens of all.

The group is neighbours on the tensor parallel axis, which have the same tokens; where these are too few, also
neighbours on the data parallel axis, which exchange tokens (token_exchange.py). What the router has chosen elsewhere is
masked. If the tensor parallel axis is longer than the group, several ranks hold the same experts, and each takes its
part of the tokens.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.errors import UsageError
from stepmark.parallel.architectures import EXPERT_PARALLEL
from stepmark.parallel.tensor.adapted_layers import is_wrapper
from stepmark.parallel.tensor.autograd_collectives import copy_to, reduce_from
from stepmark.parallel.tensor.plans import expression, model_type, own_plan, shard
from stepmark.parallel.tensor.token_exchange import NOBODY, token_exchange
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.replication import Replication, annotate_replication

WITH_MASKS = ("grouped_mm", "batched_mm")
"""transformers' implementations of experts that skip what has the number after the last expert."""


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
    """The experts of a model on a mesh, in `modules` by name. The constructor checks, the methods change the model."""

    def __init__(self, model: Any, mesh: Mesh, *, verified: bool) -> None:
        self.modules = expert_modules(model, verified=verified)
        self._mesh = mesh
        size, tensor = mesh.expert_parallel_size, mesh.tensor_parallel
        self._copies = tensor.size * mesh.experts.size // size
        ranks = range(mesh.experts.size)
        self._holders = [(rank * tensor.size + tensor.rank) // self._copies for rank in ranks]
        for name, module in self.modules.items():
            if module.num_experts % size:
                raise UsageError(
                    f"expert_parallel_size: {name} has {module.num_experts} experts, which {size} ranks cannot divide "
                    "equally; choose a divisor"
                )

    def shard_parameters(self) -> None:
        copies = Replication(self._copies, partial=self._copies > 1, experts=self._mesh.experts.size > 1)
        part, parts = self._holders[self._mesh.experts.rank], self._mesh.expert_parallel_size
        for module in self.modules.values():
            for parameter in module.parameters():
                shard(tuple(parameter.shape), 0, part, parts).replace(parameter)
                annotate_replication(parameter, copies)

    def wire(self) -> None:
        """After the parameters were replaced."""
        for module in self.modules.values():
            module.num_experts //= self._mesh.expert_parallel_size
            _Dispatch(module, self._mesh, self._holders, self._copies)


class _Dispatch:
    """Brings a module of experts the tokens of its group, and takes the sums of outputs back."""

    def __init__(self, module: Any, mesh: Mesh, holders: Sequence[int], copies: int) -> None:
        self._tensor = mesh.tensor_parallel
        self._runtime = mesh.runtime
        self._copies = copies
        self._begin = holders[mesh.experts.rank] * module.num_experts
        self._copy = mesh.tensor_parallel.rank % copies
        self._exchange = token_exchange(mesh, module.num_experts, holders) if mesh.experts.size > 1 else None
        self._placed: tuple[Tensor, Tensor] | None = None
        enter, leave = self._enter, self._leave
        if self._exchange:
            enter, leave = torch.compiler.disable(enter), torch.compiler.disable(leave)
        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave)

    def _enter(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        hidden, index, weights = inspect.signature(type(module).forward).bind(module, *args, **kwargs).args[1:]
        if self._tensor.size > 1:
            hidden, weights = copy_to(hidden, self._tensor), copy_to(weights, self._tensor)
        begin, copy = self._place()
        if self._copies > 1:
            of_others = torch.arange(len(index), device=index.device) % self._copies != copy
            index = index.masked_fill(of_others[:, None], NOBODY)
        if self._exchange:
            hidden, index, weights = self._exchange.there(hidden, index, weights)
        index, masks = index - begin, False
        if self._exchange is None or not self._exchange.exact:
            index, weights, masks = self._own(module, index, weights)
        module._is_expert_parallel = masks
        return (hidden, index, weights), {}

    def _place(self) -> tuple[Tensor, Tensor]:
        """The first of this rank's experts, and which of their copies it holds: data, which differs among ranks."""
        if self._placed is None:
            begin, copy = self._runtime.place([torch.tensor([self._begin]), torch.tensor([self._copy])])
            self._placed = begin, copy
        return self._placed

    def _own(self, module: Any, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Masks what experts of other ranks compute, or other copies of these experts. Also returns whether the module
        skips what is masked; otherwise it has weight 0, and adds nothing."""
        count = module.num_experts
        elsewhere = (index < 0) | (index >= count)
        skips = hasattr(module, "_is_expert_parallel") and not self._runtime.lazy
        skips = skips and module.config._experts_implementation in WITH_MASKS
        own = index.masked_fill(elsewhere, count) if skips else index.remainder(count)
        return own, weights.masked_fill(elsewhere, 0), skips

    def _leave(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if self._exchange:
            output = self._exchange.back(output)
        return reduce_from(output.clone(), self._tensor) if self._tensor.size > 1 else output
