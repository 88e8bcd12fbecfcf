"""Stepmark trains PyTorch models on lazy and eager devices with one script, and never loses a step."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepmark.checkpoint import Checkpointer
    from stepmark.checkpoint.single_file import load, save
    from stepmark.config.training_arguments import TrainingArguments
    from stepmark.data.collate import PadTo
    from stepmark.data.loader import DataLoader
    from stepmark.evaluation.evaluate import evaluate
    from stepmark.parallel.loading.load import load_for_parallelism
    from stepmark.parallel.tensor.parallelize import parallelize
    from stepmark.parallel.zero.zero_redundancy import ZeroRedundancyOptimizer
    from stepmark.runtime.mesh import Mesh
    from stepmark.trainer.trainer import Trainer

__version__ = "0.1.0"
__all__ = [
    "Checkpointer",
    "DataLoader",
    "Mesh",
    "PadTo",
    "Trainer",
    "TrainingArguments",
    "ZeroRedundancyOptimizer",
    "evaluate",
    "load",
    "load_for_parallelism",
    "parallelize",
    "save",
]

# Names are loaded when they are first used, so that importing stepmark costs nothing.
_HOMES = {
    "Checkpointer": "stepmark.checkpoint",
    "DataLoader": "stepmark.data.loader",
    "Mesh": "stepmark.runtime.mesh",
    "PadTo": "stepmark.data.collate",
    "Trainer": "stepmark.trainer.trainer",
    "TrainingArguments": "stepmark.config.training_arguments",
    "evaluate": "stepmark.evaluation.evaluate",
    "load_for_parallelism": "stepmark.parallel.loading.load",
    "parallelize": "stepmark.parallel.tensor.parallelize",
    "ZeroRedundancyOptimizer": "stepmark.parallel.zero.zero_redundancy",
    "load": "stepmark.checkpoint.single_file",
    "save": "stepmark.checkpoint.single_file",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'stepmark' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
