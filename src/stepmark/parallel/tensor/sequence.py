"""Sequence parallelism: between tensor parallel regions, activations are sharded along the sequence.

They are sharded from the first layer's input to the last norm's output. Norms and residual connections work on a shard
of the sequence, so their weights get partial gradients; regions gather and scatter (layers.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from stepmark.errors import UsageError
from stepmark.parallel.tensor.autograd_collectives import gather, gather_partial, scatter
from stepmark.parallel.tensor.dropout import RegionSeeds
from stepmark.parallel.tensor.layers import SEQUENCE_DIM
from stepmark.runtime.collectives import Collectives

LAYERS_AND_NORM = {
    "gpt2": ("h", "ln_f"),
    "llama": ("layers", "norm"),
    "mistral": ("layers", "norm"),
    "qwen2": ("layers", "norm"),
    "qwen3": ("layers", "norm"),
}
"""The layers and the last norm of each supported model type, as attributes of the base model."""


def sequence_modules(model: Any) -> tuple[nn.ModuleList, nn.Module]:
    """The layers and the last norm. Raises UsageError for a model type that does not support sequence parallelism."""
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in LAYERS_AND_NORM:
        raise UsageError(
            f"sequence_parallel: {kind} is not supported, only {', '.join(sorted(LAYERS_AND_NORM))}; set it to false"
        )
    layers, norm = LAYERS_AND_NORM[kind]
    base = model.base_model
    return getattr(base, layers), getattr(base, norm)


def shard_sequence(model: Any, axis: Collectives, seeds: RegionSeeds, head_is_sharded: bool) -> None:
    """Shards activations before the first layer and gathers them after the last norm.

    `head_is_sharded`: the computations that follow produce partial gradients.
    """
    layers, norm = sequence_modules(model)

    def begin(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        seeds.sharded(module, -1)
        if args:
            return (_shard(args[0], axis), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": _shard(kwargs["hidden_states"], axis)}

    def end(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        seeds.replicated(module, -1)
        return (gather_partial if head_is_sharded else gather)(output, axis, SEQUENCE_DIM)

    layers[0].register_forward_pre_hook(begin, with_kwargs=True)
    norm.register_forward_hook(end)


def _shard(tensor: Tensor, axis: Collectives) -> Tensor:
    length = tensor.shape[SEQUENCE_DIM]
    if length % axis.size:
        raise UsageError(
            f"sequence_parallel: sequences of {length} tokens cannot be split into {axis.size} equal shards; make "
            "block_size a multiple of tensor_parallel_size"
        )
    return scatter(tensor, axis, SEQUENCE_DIM)


def partial_parameters(model: Any) -> Iterator[nn.Parameter]:
    """The parameters of the layers and of the last norm; those that are replicated get partial gradients."""
    layers, norm = sequence_modules(model)
    yield from layers.parameters()
    yield from norm.parameters()
