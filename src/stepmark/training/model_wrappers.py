"""Models that come wrapped for another way of training on several ranks."""

from __future__ import annotations

import logging

from torch import nn

from stepmark.errors import UsageError

logger = logging.getLogger("stepmark")

_UNSUPPORTED = ("DataParallel", "FullyShardedDataParallel", "FSDPModule", "XlaFullyShardedDataParallel")


def without_wrapper(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, with a warning; any other module as it is.

    Gradients are averaged over the ranks by the training step, so the wrapper, which would do the same in its own
    forward pass, is not called.

    Raises:
        UsageError: The model is wrapped in something else that shards it or reduces its gradients, or holds such a
            wrapper further inside.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        logger.warning(
            "the model is wrapped in DistributedDataParallel: the module inside is used, since gradients are averaged "
            "by the training step; pass the module itself"
        )
        inner = model.module
        assert isinstance(inner, nn.Module)
        model = inner
    for name, module in model.named_modules():
        wrapper = _wrapper(module)
        if wrapper is not None:
            where = f" (its part {name!r})" if name else ""
            raise UsageError(
                f"model: it is wrapped in {wrapper}{where}, which shards it or reduces its gradients itself; pass the "
                "module inside, and use zero_1 or tensor_parallel_size for a model that does not fit on a device"
            )
    return model


def _wrapper(module: nn.Module) -> str | None:
    """The name of the wrapper that a module is, if it is one."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return "DistributedDataParallel"
    return next((each.__name__ for each in type(module).__mro__ if each.__name__ in _UNSUPPORTED), None)
