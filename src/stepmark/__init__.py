"""Trains PyTorch models on lazy (PyTorch/XLA) and eager devices, with checkpoints that survive any interruption.

The public names are those of `__all__` here, in `stepmark.checkpoint`, `stepmark.trl` and
`stepmark.sentence_transformers`, and the errors in `stepmark.errors`. All other modules and names are private and may
change in any release.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepmark.checkpoint import Checkpointer as Checkpointer
    from stepmark.checkpoint.single_file import load as load
    from stepmark.checkpoint.single_file import save as save
    from stepmark.config.data_arguments import DataArguments as DataArguments
    from stepmark.data.chat.conversations import Conversations as Conversations
    from stepmark.data.loader.collate import PadTo as PadTo
    from stepmark.data.loader.loader import DataLoader as DataLoader
    from stepmark.data.loader.prefetcher import DevicePrefetcher as DevicePrefetcher
    from stepmark.data.prepared_data import prepare
    from stepmark.data.tokenize.tokenizer import load_tokenizer as load_tokenizer
    from stepmark.evaluation.evaluate import evaluate as evaluate
    from stepmark.parallel.loading.load import load_for_parallelism as load_for_parallelism
    from stepmark.parallel.optimizer.zero_redundancy import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer
    from stepmark.parallel.parallelize import parallelize as parallelize
    from stepmark.runtime.mesh import Mesh as Mesh
    from stepmark.runtime.module_placement import place_module as place_module
    from stepmark.trainer.run_folder.run_log import read_metrics as read_metrics
    from stepmark.trainer.seq2seq import Seq2SeqTrainer as Seq2SeqTrainer
    from stepmark.trainer.trainer import Trainer as Trainer
    from stepmark.trainer.training_arguments import Seq2SeqTrainingArguments as Seq2SeqTrainingArguments
    from stepmark.trainer.training_arguments import TrainingArguments as TrainingArguments
    from stepmark.training.learning_rate_schedule import build_schedule as build_schedule
    from stepmark.training.optimizer import build_optimizer as build_optimizer
    from stepmark.training.step import TrainStep as TrainStep
    from stepmark.training.weighted_loss import MicroBatchLoss as MicroBatchLoss

    prepare_data = prepare

__version__ = "0.1.0"
# A name is loaded on first use, so that importing stepmark loads neither torch nor transformers.
_MODULES = {
    "Checkpointer": "stepmark.checkpoint",
    "Conversations": "stepmark.data.chat.conversations",
    "DataArguments": "stepmark.config.data_arguments",
    "DataLoader": "stepmark.data.loader.loader",
    "DevicePrefetcher": "stepmark.data.loader.prefetcher",
    "Mesh": "stepmark.runtime.mesh",
    "MicroBatchLoss": "stepmark.training.weighted_loss",
    "PadTo": "stepmark.data.loader.collate",
    "Seq2SeqTrainer": "stepmark.trainer.seq2seq",
    "Seq2SeqTrainingArguments": "stepmark.trainer.training_arguments",
    "TrainStep": "stepmark.training.step",
    "Trainer": "stepmark.trainer.trainer",
    "TrainingArguments": "stepmark.trainer.training_arguments",
    "ZeroRedundancyOptimizer": "stepmark.parallel.optimizer.zero_redundancy",
    "build_optimizer": "stepmark.training.optimizer",
    "build_schedule": "stepmark.training.learning_rate_schedule",
    "evaluate": "stepmark.evaluation.evaluate",
    "load": "stepmark.checkpoint.single_file",
    "load_for_parallelism": "stepmark.parallel.loading.load",
    "load_tokenizer": "stepmark.data.tokenize.tokenizer",
    "parallelize": "stepmark.parallel.parallelize",
    "place_module": "stepmark.runtime.module_placement",
    "prepare_data": "stepmark.data.prepared_data",
    "read_metrics": "stepmark.trainer.run_folder.run_log",
    "save": "stepmark.checkpoint.single_file",
}
__all__ = [*_MODULES]
_RENAMED = {"prepare_data": "prepare"}  # in their modules


def _export_place() -> None:
    """Under srun, sets torchrun's variables before transformers imports torch_xla, which reads them."""
    from stepmark.launch.world import export_place

    export_place()


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        from stepmark.config.unknown_fields import export_message

        message = export_message(name)
        if message is not None:
            raise ImportError(message)
        raise AttributeError(f"module 'stepmark' has no attribute {name!r}")
    from stepmark.liveness.gc_pause import without_collection

    with without_collection():
        module = importlib.import_module(_MODULES[name])
    return getattr(module, _RENAMED.get(name, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if "SLURM_STEP_ID" in os.environ:
    _export_place()
