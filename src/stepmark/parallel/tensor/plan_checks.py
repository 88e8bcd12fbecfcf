"""What a plan must say so that a model does not train wrong without a word.

Between columns and rows activations differ among ranks. A learned module there that the plan does not name would be
used on a part of them, and its gradient would be a part of the right one; or its parameters are for all heads, and
each rank would use the first ones. Neither need fail. Which modules lie there cannot be told from outside, so inside a
module with children whose outputs or inputs stay cut a plan has to name all that learn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from stepmark.errors import UsageError
from stepmark.parallel.tensor.plans import Style

LATENT_ATTENTION = ("kv_a_proj_with_mqa", "kv_a_proj", "kv_a_layernorm")


def check_plan(model: Any, styles: Mapping[str, Style], uncut: Iterable[nn.Module]) -> None:
    """Raises UsageError, naming the module, where a plan does not say enough. `uncut`: modules that are not the plan's
    concern (embedding and head)."""
    modules = dict(model.named_modules())
    apart = {id(module) for module in uncut}
    parents = {
        name.rpartition(".")[0]
        for name, style in styles.items()
        if style.kind in ("colwise", "rowwise") and id(modules[name]) not in apart
    }
    for parent in sorted(parents):
        _check_region(parent, modules[parent], styles, apart)


def _check_region(parent: str, region: nn.Module, styles: Mapping[str, Style], apart: set[int]) -> None:
    latent = [name for name, _ in region.named_children() if name in LATENT_ATTENTION]
    if latent:
        raise UsageError(
            f"tensor_parallel_size: {parent}.{latent[0]} makes keys that all heads share (multi-head latent "
            "attention), which is not supported"
        )
    for inner, module in region.named_modules(prefix=parent):
        if id(module) in apart or _named(inner, styles):
            continue
        own = [name for name, _ in module.named_parameters(recurse=False)]
        if own:
            raise UsageError(
                f"tensor_parallel_size: the plan cuts modules in {parent or 'the model'} and does not say what becomes "
                f"of {f'{inner}.{own[0]}'.removeprefix('.')}; name its module in a plan of your own: 'replicate' where "
                "all ranks compute the same with it, 'replicated_with_grad_allreduce' where each uses it on its own "
                "part"
            )


def _named(name: str, styles: Mapping[str, Style]) -> bool:
    """Whether a plan speaks of the module, or of one that it is in."""
    while name not in styles and "." in name:
        name = name.rpartition(".")[0]
    return name in styles
