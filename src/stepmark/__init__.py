"""Stepmark trains PyTorch models on lazy and eager devices with one script, and never loses a step."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepmark.checkpoint import Checkpointer
    from stepmark.data.collate import PadTo
    from stepmark.data.loader import DataLoader
    from stepmark.trainer.arguments import TrainingArguments
    from stepmark.trainer.trainer import Trainer

__version__ = "0.1.0"
__all__ = ["Checkpointer", "DataLoader", "PadTo", "Trainer", "TrainingArguments"]

# Names are loaded when they are first used, so that importing stepmark costs nothing.
_HOMES = {
    "Checkpointer": "stepmark.checkpoint",
    "DataLoader": "stepmark.data.loader",
    "PadTo": "stepmark.data.collate",
    "Trainer": "stepmark.trainer.trainer",
    "TrainingArguments": "stepmark.trainer.arguments",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'stepmark' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
