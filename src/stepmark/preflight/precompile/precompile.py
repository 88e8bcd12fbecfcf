"""`stepmark precompile` in one rank: makes the graphs of a recipe's run with stand-in data, and saves nothing of it.

The run's own Trainer, step and evaluator are used, so that graphs are those of the run. A graph depends on shapes and
not on values: the weights are random and all tokens are equal. Three steps with up to three micro-batches each make
every graph of training, since the micro-batches between the first and the last share one.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from stepmark.config.recipe import Recipe
from stepmark.config.training_fields import TrainingFields
from stepmark.errors import UsageError
from stepmark.preflight.precompile.stand_in_data import stand_in_data
from stepmark.preflight.precompile.table import describe
from stepmark.recipe.train import begin, build_trainer
from stepmark.runtime.compile_cache import kept_in, switched_on
from stepmark.runtime.hardware import neuron_device_present
from stepmark.runtime.xla_environment import extracting_graphs

if TYPE_CHECKING:
    from stepmark.preflight.precompile.graph_recorder import GraphRecorder
    from stepmark.runtime.context import Context
    from stepmark.trainer.setup import RunParts
    from stepmark.trainer.trainer import Trainer

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
    graphs = context.host.all_gather(recorder.graphs)
    if context.host.rank == 0:
        stages, on_host = recipe.training.pipeline_parallel_size, context.runtime.host_memory
        for_neuron = on_host or neuron_device_present()
        text = describe(graphs, kept_in(), reads_back=not on_host, stages=stages, for_neuron=for_neuron)
        print(text, flush=True)
    context.host.barrier()


def graphs_of(recipe: Recipe) -> tuple[GraphRecorder, Context]:
    """Makes every graph of the recipe's run: what this rank's device made, and the rank's context. Collective.

    Raises:
        UsageError: As `precompile`.
    """
    recipe = _shortened(recipe)
    functions, run = begin(recipe)
    context = run.context
    if not context.runtime.lazy:
        raise UsageError(
            f"device: {context.runtime.name} runs operations as they come and compiles no graphs; precompile is for "
            "lazy devices (device: xla)"
        )
    from stepmark.recipe.model import build_untrained

    training = recipe.training
    ranks = context.world.size // (training.tensor_parallel_size * training.pipeline_parallel_size)
    trainer = build_trainer(
        recipe,
        run,
        functions,
        prepare=lambda tokenizer: stand_in_data(recipe, tokenizer, max(ranks, 1), STEPS),
        build=build_untrained,
    )
    return record_graphs(trainer), context


def record_graphs(trainer: Trainer) -> GraphRecorder:
    """Trains a few steps and evaluates; what the device makes for it. Collective."""
    from stepmark.preflight.precompile.graph_recorder import GraphRecorder
    from stepmark.runtime.xla import XlaRuntime

    runtime = trainer.context.runtime
    assert isinstance(runtime, XlaRuntime)
    recorder = GraphRecorder(runtime, extracting=extracting_graphs())
    with recorder.observing():
        _train(trainer.make_parts(), recorder)
        if trainer.args.eval_strategy != "no":
            recorder.part = "evaluation"
            trainer.run_evaluation(trainer.get_eval_dataloader(), gather=trainer.compute_metrics is not None)
            trainer.sample_texts()
        runtime.step_boundary(wait=True)
    return recorder


def _train(parts: RunParts, recorder: GraphRecorder) -> None:
    from stepmark.data.loader.prefetcher import DevicePrefetcher
    from stepmark.training.learning_rate_schedule import advance

    follow = PartsOfStep(recorder, parts.args.gradient_accumulation_steps)
    runtime = parts.context.runtime
    for number, batch in enumerate(DevicePrefetcher(parts.loader, runtime)):
        follow.begin()
        statistics = parts.step(number, batch, follow.hooks)
        runtime.to_host([statistics.values])
        advance(parts.schedule)


class PartsOfStep:
    """Tells the recorder which part of a step is in progress, by the step's own hooks."""

    def __init__(self, recorder: GraphRecorder, micro_batches: int) -> None:
        from stepmark.training.step import StepHooks

        self._recorder = recorder
        self._micro_batches = micro_batches
        self._done = 0
        self.hooks = StepHooks(after_micro_step=self._micro_step_done, before_update=self._update_begins)

    def begin(self) -> None:
        """A step begins."""
        self._done = 0
        self._recorder.part = "step" if self._micro_batches == 1 else "micro-step"

    def _micro_step_done(self) -> None:
        """Called before the boundary that runs a micro-step which is not the last."""
        self._done += 1
        self._recorder.after_boundary = "last micro-step" if self._done == self._micro_batches - 1 else "micro-step"

    def _update_begins(self) -> None:
        self._recorder.part = "step" if self._micro_batches == 1 else "update"


def _shortened(recipe: Recipe) -> Recipe:
    """The recipe with few steps, the default of its compile cache on, and nothing that writes files."""
    training: TrainingFields = recipe.training
    if training.compile_cache is False:
        raise UsageError("compile_cache: is false, so no graph would be kept; leave it out, or name a folder")
    short = dataclasses.replace(
        training,
        max_steps=STEPS,
        gradient_accumulation_steps=_micro_batches(training),
        compile_cache=switched_on(training.compile_cache),  # type: ignore[arg-type]  # true, too
        dataloader_num_workers=0,
        report_to="none",
        disable_tqdm=True,
    )
    return dataclasses.replace(recipe, training=short)


def _micro_batches(training: TrainingFields) -> int:
    """As few as make every graph: a multiple of a pipeline's ranks makes those of every schedule."""
    ranks = training.pipeline_parallel_size
    return min(training.gradient_accumulation_steps, 2 * ranks if ranks > 1 else MICRO_BATCHES)
