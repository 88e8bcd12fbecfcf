"""How checkpoints are evaluated outside of training: data, functions and loss, the same for every checkpoint."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from stepmark.checkpoint.format.manifest import MANIFEST, read_manifest
from stepmark.config.data_arguments import columns_of
from stepmark.config.recipe import Recipe
from stepmark.errors import CheckpointNotFound, DataError, UsageError
from stepmark.evaluation.evaluate import evaluate
from stepmark.evaluation.metric_functions import load_function, load_metrics
from stepmark.evaluation.metrics import plain_values, with_prefix
from stepmark.evaluation.restored_model import ModelReader, is_adapter, needs_code, read_config
from stepmark.evaluation.run_options import OF_LOSS, RunOptions
from stepmark.recipe.used_recipe import USED_RECIPE
from stepmark.runtime.mesh import Mesh
from stepmark.training.model_options import check_attention
from stepmark.training.packing_check import check_packing
from stepmark.watcher.evaluation_data import MODEL_CONFIGS, EvaluationSet, Request, prepare_sets

logger = logging.getLogger("stepmark")

PREFIX = "eval"
NO_METRICS = "none"  # as --metrics


@dataclass(frozen=True)
class EvaluationContext:
    """The third argument of an `--evaluator`, after model and tokenizer.

    `datasets` are blocks of tokens by name (None for one without a name), empty where there is no data. `evaluate()`
    returns loss, perplexity and `--metrics` over them. All ranks of `mesh` call the function; rank 0's numbers count.
    """

    checkpoint: Path
    step: int | None
    mesh: Mesh
    datasets: Mapping[str | None, Any]
    evaluate: Callable[[], dict[str, float]]

    @property
    def device(self) -> torch.device:
        return self.mesh.runtime.device


@dataclass(frozen=True)
class EvaluationSetup:
    """Evaluates checkpoints, all in the same way. Create it with `prepare`, on all ranks. `metrics`, `evaluator`: the
    user's functions, `module:function`. `moves_best`: whether the run's `best` follows the results."""

    mesh: Mesh
    sets: Mapping[str | None, EvaluationSet]
    metrics: str | None
    evaluator: str | None
    tokenizer: Any
    options: RunOptions
    reader: ModelReader
    moves_best: bool

    @classmethod
    def prepare(cls, request: Request, mesh: Mesh, recipe: Recipe | None, checkpoint: Path) -> EvaluationSetup:
        """`checkpoint` is one of those to be evaluated; its tokenizer is used where no recipe names one. Python code
        of its model and tokenizer is executed only where the request trusts it, whatever its recipe says.

        Raises DataError or UsageError where there is nothing to evaluate on, and CheckpointNotFound, on all ranks,
        where the checkpoint has been deleted in the meantime.
        """
        base_model, trust = request.base_model, request.trust_remote_code
        if base_model is not None and not is_adapter(checkpoint):
            raise UsageError(f"--base-model: {checkpoint} holds a complete model and no adapter; leave it out")
        if recipe is not None and (not request.data or recipe.model.task == "reward"):
            recipe.refuse_task("stepmark evaluate", "see the run's own evaluations, or name texts with --data")
        metrics, evaluator = _metrics_of(request, recipe), request.evaluator or None
        options = options_of(recipe, checkpoint)
        tokenizer, longest = _read_what_texts_need(mesh, recipe, checkpoint, trust, base_model)
        sets: dict[str | None, EvaluationSet] = {}
        if recipe is None and not request.data and not evaluator:
            raise UsageError(_what_to_pass(checkpoint, options, request))
        reads = bool(request.data) or recipe is not None or not evaluator  # which needs no data
        if tokenizer is None and reads:
            raise UsageError(
                f"{checkpoint} has no tokenizer, so texts cannot be read (a Trainer with processing_class saves it)"
                "; give a function with --evaluator, or call stepmark.evaluate with custom data"
            )
        if reads:
            with mesh.context.leader_first("preparing evaluation data"):
                try:
                    sets = prepare_sets(request, options, recipe, tokenizer, longest)
                except (DataError, UsageError) as error:
                    if not evaluator or request.data:
                        raise
                    logger.warning("evaluating without data: %s", error)  # which may not be needed
        # Data of the run's own decide which of its checkpoints is the best, where there are such data.
        moves_best = request.update_best or not request.data or recipe is None
        attention = request.attn_implementation or options.attn_implementation
        check_attention(attention, mesh.runtime.device.type, half=True)
        reader = ModelReader(mesh.runtime, trust_remote_code=trust, base_model=base_model, attention=attention)
        batch_size = request.batch_size or options.per_device_eval_batch_size
        options = replace(options, per_device_eval_batch_size=batch_size)
        return cls(mesh, sets, metrics, evaluator, tokenizer, options, reader, moves_best)

    @property
    def identity(self) -> str:
        """Changes when results may change: with data, functions or loss; not with devices or batch size."""
        return xxhash.xxh3_64_hexdigest(json.dumps(self.describe(), sort_keys=True).encode())

    def describe(self) -> dict[str, Any]:
        """The identity as plain values."""
        return {
            "data": {name or "": each.content for name, each in self.sets.items()},
            "metrics": self.metrics,
            "evaluator": self.evaluator,
            "bf16": self.options.bf16,
            **({"fp16": True} if self.options.fp16 else {}),
            **({} if self.options.causal_shift is None else {"causal_shift": self.options.causal_shift}),
            "label_smoothing_factor": self.options.label_smoothing_factor,
        }

    def summary(self, origin: str) -> str:
        """One line: the data, and what else the numbers depend on. `origin`: of a block size that is not given."""
        sets = [
            f"{len(each.blocks)} samples of up to {each.blocks.block_size} tokens of {each.source}"
            for each in self.sets.values()
        ]
        run, named = self.options, {"metrics": self.metrics, "evaluator": self.evaluator}
        options = [f"{name} {value}" for name, value in named.items() if value]
        options += [name for name, on in (("bf16", run.bf16), ("fp16", run.fp16)) if on]
        smoothing = run.label_smoothing_factor
        options += [f"label_smoothing_factor {smoothing:g}"] if smoothing else []
        return "; ".join([f"evaluating {', '.join(sets) or 'without data'}", origin, *options])

    def evaluate(self, checkpoint: Path) -> dict[str, float]:
        """The metrics of one checkpoint; those of an `--evaluator` may differ among ranks. Collective.

        Raises CheckpointError where it cannot be read, MetricsError where a function of the user's fails.
        """
        model = self.reader.read(checkpoint)
        if self.evaluator is None:
            return self._standard(model)
        step = read_manifest(checkpoint).step if (checkpoint / MANIFEST).is_file() else None
        blocks = {name: each.blocks for name, each in self.sets.items()}
        context = EvaluationContext(checkpoint, step, self.mesh, blocks, lambda: self._standard(model))
        model.eval()
        with torch.no_grad():
            found = load_function(self.evaluator, "--evaluator")(model, self.tokenizer, context)
        return with_prefix(plain_values(found, f"--evaluator {self.evaluator}", only_numbers=True), PREFIX)

    def _standard(self, model: nn.Module) -> dict[str, float]:
        sets = {name: each.blocks for name, each in self.sets.items()}
        check_packing(model, sets.values(), whole=False)
        return evaluate(
            model,
            sets.get(None, sets),
            mesh=self.mesh,
            batch_size=self.options.per_device_eval_batch_size,
            **{name: getattr(self.options, name) for name in OF_LOSS},
            metric_key_prefix=PREFIX,
            **load_metrics(self.metrics, "--metrics"),
        )


def check_functions(request: Request) -> None:
    """Imports the user's functions. Raises UsageError where they do not exist."""
    if request.metrics not in (None, NO_METRICS):
        load_metrics(request.metrics, "--metrics")
    if request.evaluator:
        load_function(request.evaluator, "--evaluator")


def _metrics_of(request: Request, recipe: Recipe | None) -> str | None:
    """The metrics function: the run's recipe's, unless another, or none, was given. UsageError where it is missing."""
    if request.metrics is not None:
        return None if request.metrics == NO_METRICS else request.metrics
    named = None if recipe is None else recipe.evaluation.metrics
    if named is not None:
        load_metrics(named, f"metrics (of the run; --metrics {NO_METRICS} evaluates without)")
    return named


def _what_to_pass(checkpoint: Path, options: RunOptions, request: Request) -> str:
    """The error for a checkpoint of a run without a recipe, evaluated without data."""
    flags = ["--data FILE (or a folder, a pattern, or python-stdlib)"]
    if options.block_size is None and request.block_size is None:
        flags.append("--block_size N (tokens of a sample)")
    if options.metrics is not None and request.metrics is None:
        flags.append(options.metrics_flag)
    if not any(checkpoint.glob("tokenizer*")):
        flags = ["--evaluator MODULE:FUNCTION (it has no tokenizer, so texts cannot be read)"]
    return (
        f"--data: {checkpoint} has no {USED_RECIPE} that names its data (those of the Python Trainer and plain model "
        f"folders have none); to evaluate as its run did, pass {' '.join(flags)}"
    )


def options_of(recipe: Recipe | None, checkpoint: Path) -> RunOptions:
    """Evaluation settings of a checkpoint's run: from its recipe, from the checkpoint, or the defaults."""
    if recipe is not None:
        return RunOptions.of_training(
            recipe.training,
            block_size=recipe.data.block_size,
            columns=columns_of(recipe.data),
            attn_implementation=recipe.model.attn_implementation,
        )
    return RunOptions.of_checkpoint(checkpoint) or RunOptions()


def _read_what_texts_need(
    mesh: Mesh, recipe: Recipe | None, checkpoint: Path, trust: bool, base_model: str | None
) -> tuple[Any, int | None]:
    """The tokenizer, and the model's positions, None where they are not known. Collective.

    Raises CheckpointNotFound, on all ranks, where one of them finds the checkpoint deleted.
    """
    found: tuple[Any, int | None] = (None, None)
    problem: Exception | None = None
    try:
        reads = recipe is not None or any(checkpoint.glob("tokenizer*"))
        config = read_config(checkpoint, trust, base_model) if reads else None
        found = tokenizer_of(recipe, checkpoint, trust), getattr(config, "max_position_embeddings", None)
    except Exception as error:  # transformers and parsers raise many kinds where files vanish
        problem = error
    configs = [os.path.lexists(checkpoint / name) for name in MODEL_CONFIGS]
    there = checkpoint.is_dir() and (problem is None or any(configs))
    if not all(mesh.context.host.all_gather(there)):
        raise CheckpointNotFound(f"{checkpoint} was deleted before it was evaluated") from problem
    if problem is not None:
        raise problem
    return found


def tokenizer_of(recipe: Recipe | None, checkpoint: Path, trust: bool) -> Any:
    """The tokenizer of the run: the checkpoint's copy, else the recipe's; None where there is neither."""
    from stepmark.data.tokenize.tokenizer import OWN_CODE, load_tokenizer
    from stepmark.recipe.model import build_tokenizer

    if not any(checkpoint.glob("tokenizer*")):
        return None if recipe is None else build_tokenizer(recipe.model)
    try:
        return load_tokenizer(str(checkpoint), trust)
    except UsageError as error:
        if OWN_CODE in str(error):
            raise UsageError(needs_code(checkpoint)) from error
        raise
