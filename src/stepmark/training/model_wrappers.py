"""Models that come wrapped: by torch.compile, by peft, or for another way of training on several ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from stepmark.errors import UsageError
from stepmark.parallel.parallelize import parallelized

logger = logging.getLogger("stepmark")

_UNSUPPORTED = {
    *("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"),
    "XlaFullyShardedDataParallel",
}


def without_wrapper(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, with a warning, and inside torch.compile, compiled in place; any other
    module as it is.

    Gradients are averaged over the ranks by the training step, so the first wrapper, which would do the same in its own
    forward pass, is not called. The second changes the names of all parameters.

    Raises UsageError where the model is wrapped in something else that shards it or reduces its gradients, or holds
    such a wrapper further inside.
    """
    if _is_compiled(model):
        return without_wrapper(_compiled_in_place(model))
    if isinstance(model, nn.parallel.DistributedDataParallel):
        logger.warning(
            "the model is wrapped in DistributedDataParallel: the module inside is used, since gradients are averaged "
            "by the training step; pass the module itself"
        )
        return without_wrapper(model.module)
    for owner in list(model.modules()):
        for name, part in owner.named_children():
            if _is_compiled(part):
                setattr(owner, name, _compiled_in_place(part))
    for name, module in model.named_modules():
        wrapper = next((each.__name__ for each in type(module).__mro__ if each.__name__ in _UNSUPPORTED), None)
        if wrapper is not None and parallelized(model) is None:
            where = f" (its part {name!r})" if name else ""
            raise UsageError(
                f"model: it is wrapped in {wrapper}{where}, which shards it or reduces its gradients itself; pass the "
                "module inside, and use fsdp or tensor_parallel_size for a model that does not fit on a device"
            )
    return model


def _is_compiled(module: nn.Module) -> bool:
    """Whether it is what torch.compile returns for a module. Its class is not imported: that takes seconds."""
    return type(module).__name__ == "OptimizedModule" and isinstance(getattr(module, "_orig_mod", None), nn.Module)


def _compiled_in_place(compiled: nn.Module) -> nn.Module:
    """The module in it, compiled with the same settings as by `nn.Module.compile`."""
    module = compiled._orig_mod
    assert isinstance(module, nn.Module)

    def call(*args: Any, **keywords: Any) -> Any:
        return module._call_impl(*args, **keywords)

    module._compiled_call_impl = compiled.dynamo_ctx(call)  # type: ignore[operator]
    return module


def adapter_tensors(model: Any, adapter_name: str) -> dict[str, tuple[str, Tensor]]:
    """The live tensors that peft saves of an adapter: name in its file to name in the model and tensor. The name in the
    model is empty for a tensor that peft computes."""
    from peft import get_peft_model_state_dict

    state = type(model).state_dict(model, keep_vars=True)  # a script may have replaced the model's own
    names = {id(tensor): name for name, tensor in state.items()}
    saved = get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter_name)
    return {name: (names.get(id(tensor), ""), tensor) for name, tensor in saved.items()}


def base_tensors(model: Any, own: set[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the model that are not the adapter's, by name. `own`: a name in the model of each of these."""
    state = type(model).state_dict(model, keep_vars=True)
    identities = {id(state[name]) for name in own if name in state}
    for name, tensor in sorted(state.items()):
        if id(tensor) not in identities and isinstance(tensor, Tensor):
            yield name, tensor
