"""Checks that a plan covers every module that would otherwise train incorrectly without an error.

Between a layer sharded by columns and one sharded by rows, activations differ among ranks. A module with parameters
there, if the plan does not name it, would get partial gradients; or its parameters are for all heads, and every rank
would use the first ones. Neither has to fail. Which modules lie there cannot be seen from outside, so the plan must
name every module with parameters inside a module that has children whose outputs or inputs stay sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from stepmark.errors import UsageError
from stepmark.parallel.tensor.plans import Style

LATENT_ATTENTION = ("kv_a_proj_with_mqa", "kv_a_proj", "kv_a_layernorm")


def check_plan(model: Any, styles: Mapping[str, Style], exempt: Iterable[nn.Module]) -> None:
    """Raises UsageError, naming the module, where a plan is incomplete. `exempt`: modules that the plan need not cover
    (embedding and head)."""
    modules = dict(model.named_modules())
    exempt_ids = {id(module) for module in exempt}
    parents = {
        name.rpartition(".")[0]
        for name, style in styles.items()
        if style.kind in ("colwise", "rowwise") and id(modules[name]) not in exempt_ids
    }
    for parent in sorted(parents):
        _check_region(parent, modules[parent], styles, exempt_ids)


def _check_region(parent: str, region: nn.Module, styles: Mapping[str, Style], exempt_ids: set[int]) -> None:
    latent = [name for name, _ in region.named_children() if name in LATENT_ATTENTION]
    if latent:
        raise UsageError(
            f"tensor_parallel_size: {parent}.{latent[0]} computes keys that all heads share (multi-head latent "
            "attention), which is not supported; set tensor_parallel_size: 1"
        )
    for inner, module in region.named_modules(prefix=parent):
        if id(module) in exempt_ids or _named(inner, styles):
            continue
        own = [name for name, _ in module.named_parameters(recurse=False)]
        if own:
            raise UsageError(
                f"tensor_parallel_size: the plan shards modules in {parent or 'the model'} but does not mention "
                f"{f'{inner}.{own[0]}'.removeprefix('.')}; add its module to a custom plan: 'replicate' if all ranks "
                "compute the same with it, 'replicated_with_grad_allreduce' if each uses it on its own heads or units"
            )


def _named(name: str, styles: Mapping[str, Style]) -> bool:
    """Whether a plan names the module, or one that contains it."""
    while name not in styles and "." in name:
        name = name.rpartition(".")[0]
    return name in styles
