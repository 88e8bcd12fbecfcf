"""Layers as a plan sees them, whatever peft has put around them, and which adapters can be sharded.

A LoRA layer calls its base layer and adds B(A(dropout(x))). Where the base is sharded by columns, so is B: A is
replicated and reads the region's input, so that each rank has a part of its gradient. Where the base is sharded by
rows, so is A, whose output is summed over the ranks, and B is replicated. LoRA of an embedding stays replicated.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import ref

from torch import nn

from stepmark.errors import UsageError

_TRAINING_WRAPPER = "peft.utils.other", "AuxiliaryTrainingWrapper"
_SAVED_MODULE = "peft.utils.other", "ModulesToSaveWrapper"


@dataclass(frozen=True)
class LoraAdapter:
    """One adapter of a LoRA layer. `a`: inputs to rank; `b`: rank to outputs."""

    name: str
    a: nn.Linear
    b: nn.Linear
    dropout: nn.Module


@dataclass(frozen=True)
class AdaptedLayer:
    """A layer with its adapters."""

    name: str  # in the model, of `called`
    called: nn.Module  # what the model calls: the LoRA layer around it, or the layer itself
    layer: Any  # which has the weight
    adapters: tuple[LoraAdapter, ...] = ()  # of a LoRA layer around a linear one

    def own_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The weight and the bias, with full names."""
        prefix = self.name if self.called is self.layer else f"{self.name}.base_layer"
        for name, parameter in self.layer.named_parameters(recurse=False):
            yield f"{prefix}.{name}", parameter

    def parameters_of(self, side: str) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of all adapters' "a" or "b", with full names."""
        for adapter in self.adapters:
            linear: nn.Linear = getattr(adapter, side)
            for name, parameter in linear.named_parameters():
                yield f"{self.name}.lora_{side.upper()}.{adapter.name}.{name}", parameter


def adapted_layers(name: str, module: nn.Module) -> list[AdaptedLayer]:
    """The layers at a place of the model: the only one, or of `modules_to_save` the original and its trained copies."""
    if _is_a(module, *_SAVED_MODULE):
        copies: Any = module.modules_to_save
        found = adapted_layers(f"{name}.original_module", module.original_module)  # type: ignore[arg-type]
        for key, copy in copies.items():
            found += adapted_layers(f"{name}.modules_to_save.{key}", copy)
        return found
    if not is_adapted(module):
        return [AdaptedLayer(name, module, module)]
    lora: Any = module
    adapters = tuple(
        LoraAdapter(key, lora.lora_A[key], lora.lora_B[key], lora.lora_dropout[key]) for key in lora.lora_A
    )
    return [AdaptedLayer(name, module, lora.get_base_layer(), adapters)]


def base_of(module: nn.Module) -> nn.Module:
    """The layer inside peft's wrappers."""
    return adapted_layers("", module)[0].layer


def is_adapted(module: object) -> bool:
    """Whether the module is a layer of peft around another one."""
    return _is_a(module, "peft.tuners.tuners_utils", "BaseTunerLayer")


def is_wrapper(module: object) -> bool:
    """Whether the module is what peft puts in the place of another one."""
    return is_adapted(module) or _is_a(module, *_TRAINING_WRAPPER)


def _is_a(module: object, place: str, kind: str) -> bool:
    """Whether it is of this class of peft, without which there is none."""
    return isinstance(module, getattr(sys.modules.get(place), kind, ()))


def unwrapped(model: Any) -> Any:
    """The transformers model inside a PeftModel; any other model as it is."""
    return model.get_base_model() if _is_a(model, "peft.peft_model", "PeftModel") else model


def called_models(model: Any) -> list[nn.Module]:
    """The modules by which a model is called. A PeftModel calls the inner model's `forward`, without its hooks."""
    inner = unwrapped(model)
    return [inner] if inner is model else [inner, model.base_model]


def check_adapters(model: Any, tensor_parallel_size: int, pipeline_parallel_size: int) -> None:
    """Raises UsageError for adapters that the mesh rules out, naming them."""
    inner = unwrapped(model)
    adapted = inner is not model or any(is_wrapper(module) for module in inner.modules())
    if adapted and pipeline_parallel_size > 1:
        raise UsageError(
            "pipeline_parallel_size: a model with adapters of peft cannot be cut into stages; set it to 1, and use "
            "tensor_parallel_size for a model that does not fit on a device"
        )
    if adapted and tensor_parallel_size > 1:
        _check_configurations(model)
        for name, module in inner.named_modules():
            _check_wrapper(name, module)


def _check_configurations(model: Any) -> None:
    configs: Any = getattr(model, "peft_config", {})
    for config in configs.values() if isinstance(configs, dict) else ():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind != "LORA":
            raise UsageError(f"tensor_parallel_size: adapters of type {kind} cannot be sharded, only LORA; set it to 1")
        if getattr(config, "layer_replication", None):
            raise UsageError("tensor_parallel_size: layer_replication of LoRA is not supported; set it to 1")


def _check_wrapper(name: str, module: nn.Module) -> None:
    """Raises UsageError for a layer of peft that is not LoRA, or is a variant of it."""
    if _is_a(module, *_TRAINING_WRAPPER) and not _is_a(module, *_SAVED_MODULE):
        raise UsageError(
            f"tensor_parallel_size: {name} trains single tokens (trainable_token_indices), which cannot be sharded; "
            "put the embedding into modules_to_save, or set it to 1"
        )
    if not is_adapted(module):
        return
    from peft.tuners import lora

    variants: Any = getattr(module, "lora_variant", {})  # such as DoRA, by adapter
    if variants or type(module) not in (lora.Linear, lora.Embedding):
        kind = type(next(iter(variants.values()), module))
        raise UsageError(
            f"tensor_parallel_size: {name} has an adapter of type {kind.__module__.split('.')[-2]}.{kind.__name__}, "
            "which cannot be sharded; only plain LoRA of linear layers and embeddings can; set it to 1"
        )


def refuse_adapters(model: nn.Module, called: Iterable[nn.Module]) -> None:
    """From now on, a call of one of these modules raises UsageError where peft has put anything in the place of another
    module of the model: made for the shards of this rank, or a copy without their layouts, it would train incorrectly
    without an error."""
    children = [  # no module is kept alive, since those of other pipeline stages are dropped
        (name, ref(module), key, ref(child))
        for name, module in model.named_modules()
        for key, child in module._modules.items()
        if child is not None and not is_wrapper(module)
    ]

    def check(*_: object) -> None:
        for name, parent, key, child in children:
            module = parent()
            found = None if module is None else module._modules.get(key)
            if found is not child() and is_wrapper(found):
                place = f"{name}.{key}".removeprefix(".")
                raise UsageError(
                    f"tensor_parallel_size: {place} got an adapter of peft after the model was sharded, which "
                    "would train incorrectly; add adapters to the complete model, before it is sharded"
                )

    for each in called:
        each.register_forward_pre_hook(check)
