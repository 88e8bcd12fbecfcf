"""The tokenizer's special tokens in the configuration of a model that is trained with it."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin

SPECIAL = ("eos_token_id", "bos_token_id", "pad_token_id")

logger = logging.getLogger("stepmark")


def align_special_tokens(model: nn.Module, processing_class: Any) -> None:
    """Sets the end, begin and padding tokens of the model's configurations to those of the tokenizer, as transformers'
    Trainer does when training begins: some heads look for them, generation stops at them, and they are saved.

    A token that the tokenizer lacks changes nothing. A generation configuration with several end tokens keeps them.
    """
    tokenizer = processing_class.tokenizer if isinstance(processing_class, ProcessorMixin) else processing_class
    config: Any = getattr(model, "config", None)
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or not hasattr(config, "get_text_config"):
        return
    changed = {}
    for name in SPECIAL:
        token = getattr(tokenizer, name, None)
        if token is None:
            continue
        for each in (config.get_text_config(), getattr(model, "generation_config", None)):
            if each is not None and _set(each, name, token):
                changed[name] = token
    if changed:
        found = ", ".join(f"{name}: {token}" for name, token in changed.items())
        logger.info("the model's configuration has the tokenizer's special tokens now: %s", found)


def _set(config: Any, name: str, token: int) -> bool:
    """Whether the configuration had another token."""
    before = getattr(config, name, None)
    if isinstance(before, list):
        if token in before:
            return False
        setattr(config, name, [token, *before])
        return True
    setattr(config, name, token)
    return bool(before != token)
