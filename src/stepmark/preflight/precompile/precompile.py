"""`stepmark precompile` in one rank: makes the graphs of a recipe's run with stand-in data, and saves nothing of it.

The run's own Trainer, step and evaluator are used, so that graphs are those of the run. A graph depends on shapes and
not on values: the weights are random and all tokens are equal. Three steps with up to three micro-batches each make
every graph of training, since the micro-batches between the first and the last share one.
"""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from stepmark.config.recipe import Recipe
from stepmark.config.training_fields import TrainingFields
from stepmark.data.chat.conversations import Conversations
from stepmark.data.prepared_data import Prepared, choose_block_size
from stepmark.data.tokenize.packing import PackedBlocks
from stepmark.data.tokenize.tokenized_rows import TokenizedRows
from stepmark.errors import UsageError
from stepmark.preflight.precompile.graph_text import Graph, GraphText, describe
from stepmark.preflight.precompile.neuron import check_kept
from stepmark.recipe.early_checks import check_names
from stepmark.recipe.train import begin, build_trainer
from stepmark.runtime.compile_cache import INDUCTOR_FOLDER, kept_in, switched_on
from stepmark.runtime.context import Context
from stepmark.runtime.hardware import neuron_device_present
from stepmark.runtime.xla_environment import extracting_graphs

if TYPE_CHECKING:
    from stepmark.data.loader.batch import StepBatch
    from stepmark.preflight.precompile.graph_recorder import GraphRecorder
    from stepmark.trainer.components import TrainingComponents

STEPS = 3  # a graph that differs after the first step, for example by which buffers it may reuse, is made in the second
MICRO_BATCHES = 3


def precompile(recipe: Recipe) -> None:
    """Makes every graph of the recipe's run, and prints a table of them. Collective.

    Args:
        recipe: The recipe, as the run will have it.

    Raises:
        UsageError: The device compiles no graphs, or the recipe is not valid.
    """
    recorder, context = graphs_of(recipe)
    if recorder is None:
        if context.host.rank == 0:
            backend = recipe.training.torch_compile_backend
            kept = f"kept in {os.environ[INDUCTOR_FOLDER]}" if backend == "inductor" else f"{backend} keeps none"
            print(f"{context.runtime.requested_graphs()} graphs of torch.compile; {kept}", flush=True)
        context.host.barrier()
        return
    told = context.host.all_gather(list(map(dataclasses.asdict, recorder.graphs)))
    graphs = [[Graph(**{**each, "content": GraphText(**each["content"])}) for each in of_rank] for of_rank in told]
    if context.host.rank == 0:
        stages, on_host = recipe.training.pipeline_parallel_size, context.runtime.host_memory
        for_neuron = on_host or neuron_device_present()
        text = describe(graphs, kept_in(), reads_back=not on_host, stages=stages, for_neuron=for_neuron)
        print(text, flush=True)
    context.host.barrier()


def graphs_of(recipe: Recipe) -> tuple[GraphRecorder | None, Context]:
    """Trains a few steps of the recipe's run, and evaluates: what this rank's device made for it (None where
    torch.compile does), and the rank's context. Collective.

    Raises:
        UsageError: As `precompile`.
    """
    recipe.refuse_task("stepmark precompile", "its graphs are compiled as they come")
    check_names(recipe)
    recipe = _shortened(recipe)
    run = begin(recipe)
    context = run.context
    training, runtime = recipe.training, context.runtime
    if not runtime.lazy and not training.torch_compile:
        raise UsageError(
            f"device: {runtime.name} runs operations as they come and compiles no graphs; precompile is for lazy "
            "devices (device: xla) and for torch_compile"
        )
    ranks = max(context.world.size // (training.tensor_parallel_size * training.pipeline_parallel_size), 1)
    prepare = partial(stand_in_data, recipe, data_parallel_size=ranks, steps=STEPS)
    trainer = build_trainer(recipe, run, prepare=prepare, reads_weights=False)
    if not runtime.lazy:
        _train(trainer.make_parts(), SimpleNamespace())
        return None, context
    from stepmark.preflight.precompile.graph_recorder import GraphRecorder
    from stepmark.runtime.xla import XlaRuntime

    assert isinstance(runtime, XlaRuntime)
    recorder = GraphRecorder(runtime, extracting=extracting_graphs())
    with recorder.observing():
        _train(trainer.make_parts(), recorder)
        if trainer.args.eval_strategy != "no":
            recorder.part = "evaluation"
            trainer.evaluation.run(trainer.get_eval_dataloader(), gather=trainer.compute_metrics is not None)
            trainer.evaluation.sample_texts()
        runtime.step_boundary(wait=True)
    return recorder, context


def _train(parts: TrainingComponents, recorder: GraphRecorder | SimpleNamespace) -> None:
    """Trains all steps; the recorder knows from the step's hooks which part of a step is in progress. Where a line
    reads a value, later steps are traced as in the run; steps without a trace follow, since theirs are other graphs."""
    from stepmark.data.loader.prefetcher import DevicePrefetcher
    from stepmark.trainer.telemetry.lazy_device import DeviceReadMonitor
    from stepmark.training.learning_rate_schedule import advance
    from stepmark.training.micro_batches import StepHooks

    runtime, count, done = parts.context.runtime, parts.args.gradient_accumulation_steps, 0

    def micro_step_done() -> None:
        """Called before the boundary that runs a micro-step which is not the last."""
        nonlocal done
        done += 1
        recorder.after_boundary = "last micro-step" if done == count - 1 else "micro-step"

    def update_begins() -> None:
        recorder.part = "step" if count == 1 else "update"

    hooks = StepHooks(after_micro_step=micro_step_done, before_update=update_begins, looks=False)
    lines: list[str] = []
    reads = DeviceReadMonitor(runtime, lines.extend)

    def take(number: int, batch: StepBatch) -> None:
        nonlocal done
        done, recorder.part = 0, "step" if count == 1 else "micro-step"
        with reads.within_step():
            statistics = parts.step(number, batch, hooks)
        runtime.to_host([statistics.values])
        advance(parts.schedule)

    for number, batch in enumerate(DevicePrefetcher(parts.loader, runtime)):
        take(number, batch)
    if lines:
        for extra in (1, 2):
            take(number + extra, batch)
        recorder.name_reads(lines)


def _shortened(recipe: Recipe) -> Recipe:
    """The recipe with few steps, the default of its compile cache on, and nothing that writes files."""
    training: TrainingFields = recipe.training
    check_kept(training.compile_cache)
    ranks = training.pipeline_parallel_size
    micro_batches = 2 * ranks if ranks > 1 else MICRO_BATCHES  # in a pipeline a multiple of its ranks, for any schedule
    short = dataclasses.replace(
        training,
        max_steps=STEPS,
        gradient_accumulation_steps=min(training.gradient_accumulation_steps, micro_batches),
        compile_cache=switched_on(training.compile_cache),  # type: ignore[arg-type]  # true, too
        dataloader_num_workers=0,
        report_to="none",
        disable_tqdm=True,
    )
    return dataclasses.replace(recipe, training=short)


class StandInBlocks(PackedBlocks):
    """Blocks of a file that is not there: every token is 0, and every label counts."""

    def __init__(self, samples: int, block_size: int) -> None:
        super().__init__(Path(), "u1", samples * block_size, block_size, 0)
        self._ids.values = np.broadcast_to(np.uint8(0), samples * block_size)


def stand_in_data(recipe: Recipe, tokenizer: Any, data_parallel_size: int, steps: int) -> Prepared:
    """Enough samples for `steps` steps of an epoch, the last of which lacks some, and two batches of an evaluation."""
    block_size = choose_block_size(recipe.data.block_size, tokenizer.model_max_length)
    training = recipe.training
    per_batch = training.per_device_train_batch_size * training.gradient_accumulation_steps * data_parallel_size
    ragged = 0 if training.dataloader_drop_last else (per_batch - 1) // 2

    def made(samples: int) -> StandInBlocks | Conversations:
        if recipe.data.messages_column is None:
            return StandInBlocks(samples, block_size)
        rows = TokenizedRows.of(([0] * block_size, [True] * block_size) for _ in range(samples))
        return Conversations(rows, tokenizer, max_length=block_size, packing=recipe.data.packing)

    train, evaluated = made(per_batch * steps - ragged), training.eval_strategy != "no"
    validation = made(training.per_device_eval_batch_size * data_parallel_size + 1) if evaluated else None
    return Prepared(train, validation, fingerprint="stand-in", cached=True)
