"""Model settings for training: activation checkpointing, precision, training mode, and noise on embeddings."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.config.activation_checkpointing import REENTRANT, for_device
from stepmark.errors import DeviceError, UsageError
from stepmark.filesystem.error_advice import explained
from stepmark.runtime.base import Runtime
from stepmark.runtime.eager import computes_in
from stepmark.training.model_labels import unwrapped
from stepmark.training.one_graph_per_step.transformers_forward import capturing_checkpoint, recorded_checkpoint

# transformers' method and its argument; the second is older, deprecated, and the one that models of others have.
CHECKPOINTING = {
    "activation_checkpointing_enable": "activation_checkpointing_kwargs",
    "gradient_checkpointing_enable": "gradient_checkpointing_kwargs",
}


def enable_gradient_checkpointing(model: nn.Module, runtime: Runtime, options: Mapping[str, Any] | None = None) -> None:
    """Makes a transformers model recompute the activations of each layer in the backward pass instead of keeping them.
    `options`: of `torch.utils.checkpoint`, as in `gradient_checkpointing_kwargs`. Default: `use_reentrant=False`.

    Lazy devices need torch_xla's function: torch's crashes on them.

    Raises UsageError where the model has no support for it, or the device lacks an option.
    """
    method = next((name for name in CHECKPOINTING if hasattr(model, name)), None)
    if method is None:
        raise UsageError(
            f"gradient_checkpointing: {type(model).__name__} does not support it: it has no method "
            "gradient_checkpointing_enable; use torch.utils.checkpoint in the model"
        )
    chosen = for_device(options or {}, lazy=runtime.lazy)
    with explained(lambda error: UsageError(f"gradient_checkpointing: {error}"), (ValueError,)):
        getattr(model, method)(**{CHECKPOINTING[method]: chosen})
    if not chosen[REENTRANT]:
        return
    for module in model.modules():
        function: Any = getattr(module, "_gradient_checkpointing_func", None)
        if function is None:
            continue
        if runtime.lazy:
            from stepmark.runtime.xla import checkpoint_function

            own = functools.partial(checkpoint_function(), **chosen)
            function = recorded_checkpoint(own, functools.partial(_trains, module))
        module._gradient_checkpointing_func = capturing_checkpoint(function)  # type: ignore[assignment]


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def check_not_quantized(model: nn.Module) -> None:
    """Raises UsageError for a model with quantized weights, which take no gradients and are in no checkpoint."""
    inner: Any = unwrapped(model)
    if getattr(inner, "is_quantized", False) and not getattr(inner.hf_quantizer, "is_qat_trainable", False):
        raise UsageError(
            "model: it is quantized, and Stepmark trains no quantized weights, nor adapters on them; load it without "
            "quantization_config, in bfloat16"
        )


def check_attention(name: str | None, device: str, *, half: bool) -> None:
    """Raises UsageError where a device, by its type, cannot compute the attention of this name of transformers. `half`:
    matrix products are in bfloat16 or float16, the only types that flash attention has."""
    if name not in (None, "eager", "sdpa") and device in ("cpu", "xla", "mps"):
        raise UsageError(f"attn_implementation: {device} has sdpa and eager, and no {name}; set it to one of them")
    if name is not None and "flash" in name and not half:
        raise UsageError(f"attn_implementation: {name} has no float32; set bf16 to true, or choose sdpa")


def attention_of(model: nn.Module) -> str | None:
    """transformers' name for how a model computes attention; None for another model."""
    found = getattr(getattr(unwrapped(model), "config", None), "_attn_implementation", None)
    return found if isinstance(found, str) else None


def use_attention(model: nn.Module, name: str | None) -> None:
    """Makes a transformers model compute attention by the implementation of this name; None: by its own.

    Raises UsageError where the model has no such implementation, or its package is missing.
    """
    inner: Any = unwrapped(model)
    if name is None or attention_of(model) == name:
        return
    reason = f"it computes attention by {attention_of(model)} alone"
    try:
        if inner._can_set_attn_implementation():
            inner.set_attn_implementation(name)
    except (ValueError, ImportError, OSError) as error:
        reason = " ".join(str(error).split())
    if attention_of(model) != name:
        raise UsageError(f"attn_implementation: {type(inner).__name__} cannot use {name}: {reason}; choose another")


def check_bf16(device: torch.device) -> None:
    """Raises DeviceError where the device does not support bfloat16."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise DeviceError(f"bf16: {torch.cuda.get_device_name(device)} does not support bfloat16; train in float32")
    if device.type not in ("cuda", "cpu", "xla") and not computes_in(device, torch.bfloat16):
        raise DeviceError(f"bf16: {device.type} does not support bfloat16; train in float32")


def check_fp16(runtime: Runtime) -> None:
    """Raises DeviceError where the device cannot train in float16, which needs to know of every overflow."""
    native = runtime.device.type not in ("cuda", "cpu")
    if runtime.lazy or (native and not computes_in(runtime.device, torch.float16)):
        raise DeviceError(f"fp16: {runtime.name} trains in bfloat16; set bf16: true instead")


def set_training(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Puts a model, and an optimizer that has two modes as schedule-free ones have, into training mode.

    `from_pretrained` returns models in evaluation mode, and a callback may have left one there. A `train` of its own,
    which may keep layers in evaluation mode, is called before every step.
    """
    if not _all_train(model):  # to ask is quicker
        model.train()
    train = getattr(optimizer, "train", None)
    if callable(train):
        train()


@functools.cache
def _usual_trains() -> tuple[Any, ...]:
    """torch's and transformers' `train`, which change nothing in a module that is training already."""
    from transformers import PreTrainedModel

    return nn.Module.train, PreTrainedModel.train


def _all_train(model: nn.Module) -> bool:
    """Whether every module is in training mode, and none has a `train` of its own. Goes through them as quickly as it
    can, since it does so in every step."""
    modules, kinds = [model], set()
    for module in modules:  # which grows
        if not module.training or "train" in module.__dict__:
            return False
        kinds.add(type(module))
        if children := module._modules:
            modules += [child for child in children.values() if child is not None]
    return all(kind.train in _usual_trains() for kind in kinds)


@contextlib.contextmanager
def noisy_embeddings(model: nn.Module, alpha: float | None) -> Iterator[None]:
    """NEFTune (Jain et al. 2023, arXiv:2310.05914): inside the block, and in training mode, adds uniform noise of up to
    alpha / sqrt(length * size) to the embeddings [rows, length, size], drawn from the generator of the micro-batch.
    None: no noise. Raises UsageError where the model does not say what its input embeddings are."""
    if alpha is None:
        yield
        return

    def add_noise(module: nn.Module, _: Any, output: Tensor) -> Tensor:
        bound = alpha / (output.shape[-2] * output.shape[-1]) ** 0.5
        return output + (2 * torch.rand_like(output) - 1) * bound if module.training else output

    found = getattr(unwrapped(model), "get_input_embeddings", lambda: None)()
    if not isinstance(found, nn.Module):
        raise UsageError(
            f"neftune_noise_alpha: {type(model).__name__} has no method get_input_embeddings that returns a module; "
            "add one, or leave the argument out"
        )
    hook = found.register_forward_hook(add_noise)
    try:
        yield
    finally:
        hook.remove()
