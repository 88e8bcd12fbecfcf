"""The adapter of a recipe: LoRA by peft, over a model whose own weights stay as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from stepmark.config.recipe import ModelArguments
from stepmark.errors import UsageError

if TYPE_CHECKING:
    from peft import LoraConfig


def with_adapter(model: nn.Module, config: ModelArguments) -> nn.Module:
    """The model with the adapter that the recipe asks for, if it does; its first weights are the next random numbers.

    Raises:
        UsageError: peft is not installed, or cannot adapt the modules that `lora_target_modules` names.
    """
    if config.peft is None:
        return model
    from peft import get_peft_model

    try:
        adapted: Any = get_peft_model(model, _lora(config))
    except (ValueError, TypeError) as error:  # as peft rejects modules and values
        raise UsageError(f"lora_target_modules: {' '.join(str(error).split())}") from error
    made: nn.Module = adapted
    return made


def _lora(config: ModelArguments) -> LoraConfig:
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora_r,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # a float will do
        lora_dropout=config.lora_dropout,
        target_modules=_modules(config.lora_target_modules),
    )


def _modules(given: str | list | None) -> str | list | None:
    """One name means the modules of that name; other text is a pattern of complete names, as in peft."""
    return [given] if isinstance(given, str) and given.isidentifier() else given
