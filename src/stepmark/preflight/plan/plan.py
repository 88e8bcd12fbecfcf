"""Plans a recipe on a number of ranks: memory per rank, on its own mesh and on similar ones, and the run's length."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from stepmark.config.quiet_libraries import quiet_libraries
from stepmark.config.recipe import Recipe
from stepmark.config.training_fields import TrainingFields
from stepmark.data.loader.order import BatchLayout, Epoch
from stepmark.data.prepared_data import choose_block_size, prepare
from stepmark.errors import UsageError
from stepmark.parallel.pipeline.balance import active_experts
from stepmark.parallel.pipeline.schedules import ideal_idle_share
from stepmark.parallel.pipeline.staged_model import ModelSize
from stepmark.preflight.plan.candidates import cost, neighbours, smaller
from stepmark.preflight.plan.simulated_mesh import DEVICES, PlannedDevice
from stepmark.preflight.plan.stages import StageTrace, trace_deep, trace_stages
from stepmark.preflight.plan.step_setup import StepSetup
from stepmark.preflight.plan.step_trace import StepTrace, meta_model
from stepmark.recipe.early_checks import check_names
from stepmark.recipe.model import UNLIMITED, build_tokenizer, check_device_has_attention, config_of
from stepmark.runtime.device import choose_device
from stepmark.runtime.mesh import check_sizes
from stepmark.trainer.run_folder.adapters import adapter_of

HEADROOM = 0.9  # of a device's memory: the rest is for the runtime, its libraries and fragmentation

NOT_TRACED = StepTrace({"": {}}, 0.0)


@dataclass(frozen=True)
class RankMemory:
    """Memory of a rank with some settings. `trace`: the traced step; in a pipeline that of the rank with the highest
    peak. `impossible`: why these settings cannot be used; None if they can. `stages`: the ranks of a pipeline that were
    traced: with the recipe's own settings all of them."""

    args: TrainingFields
    trace: StepTrace = NOT_TRACED
    impossible: str | None = None
    stages: tuple[StageTrace, ...] = ()

    @property
    def worst(self) -> StageTrace | None:
        """The rank of the pipeline with the highest peak; None without a pipeline."""
        return max(self.stages, key=lambda stage: stage.peak, default=None)

    @property
    def bubble(self) -> float:
        """The share of a step in which a rank waits for others of its pipeline, where all stages take equally long."""
        args = self.args
        return ideal_idle_share(args.pipeline_parallel_size, args.gradient_accumulation_steps, args.pipeline_chunks)

    def fits(self, device_memory: int) -> bool:
        """Whether it fits with some room for what is not counted."""
        return self.impossible is None and self.trace.peak <= HEADROOM * device_memory


@dataclass(frozen=True)
class Plan:
    """The plan of a recipe.

    Attributes:
        model_class: The model's class.
        size: Of the complete model.
        setup: The ranks and their device, the tokens in a sample, and the recipe's own settings.
        device_memory: Bytes of each device; None: nothing is said about what fits.
        samples_per_step: Over all ranks.
        steps: Of the complete run; None if that depends on data that was not counted.
        options: The recipe's own settings, then others.
        model_bytes, optimizer_bytes: Of a checkpoint's tensors.
        notes: Lines that the reader should know.
    """

    model_class: str
    size: ModelSize
    setup: StepSetup
    device_memory: int | None
    samples_per_step: int
    steps: int | None
    options: Sequence[RankMemory]
    model_bytes: int
    optimizer_bytes: int
    notes: Sequence[str]

    @property
    def tokens_per_step(self) -> int:
        return self.samples_per_step * self.setup.length

    @property
    def tokens(self) -> int | None:
        """Tokens of the complete run; an upper bound where an epoch's last step is not full."""
        return None if self.steps is None else self.steps * self.tokens_per_step

    @property
    def checkpoint_bytes(self) -> int:
        return self.model_bytes + self.optimizer_bytes

    @property
    def staging_bytes(self) -> int:
        """Bytes of host memory that each rank copies a checkpoint to, on average. A lazy device passes complete
        tensors, one at a time, beside that."""
        return -(-self.checkpoint_bytes // self.setup.ranks)

    @property
    def saves(self) -> int | None:
        """Checkpoints of the complete run; None where that is unknown."""
        args = self.own.args
        if args.save_strategy != "steps" or self.steps is None:
            return 0 if args.save_strategy == "no" else None
        interval = args.save_steps if args.save_steps >= 1 else math.ceil(args.save_steps * self.steps)
        return math.ceil(self.steps / max(int(interval), 1))  # the last step is saved as well

    @property
    def own(self) -> RankMemory:
        return self.options[0]

    @property
    def chosen(self) -> RankMemory | None:
        """The recipe's own settings if they fit, else the cheapest that do."""
        if self.device_memory is None:
            return None
        fitting = [option for option in self.options if option.fits(self.device_memory)]
        return min(fitting, key=lambda each: (each is not self.own, *cost(each.args, self.own.args)), default=None)


def plan_recipe(recipe: Recipe, ranks: int, device_memory: int | None = None, *, count_data: bool = False) -> Plan:
    """Plans a recipe for `ranks` ranks with `device_memory` bytes each; None: nothing is said about what fits. With
    `count_data`, an epoch's steps are counted in the data, which is tokenized for that.

    Raises UsageError or DataError for what the recipe describes wrongly.
    """
    quiet_libraries()
    args = recipe.training
    check_names(recipe)
    sizes = args.tensor_parallel_size, args.pipeline_parallel_size, args.expert_parallel_size
    check_sizes(ranks, *sizes, replicas=args.data_parallel_replicas, begin="plan for")
    notes: list[str] = []
    tokenizer = None
    try:
        tokenizer = build_tokenizer(recipe.model)
    except UsageError as error:
        notes.append(f"Planned with the configuration's own vocabulary: {error}")
    config = config_of(recipe, tokenizer)
    block_size = choose_block_size(recipe.data.block_size, getattr(tokenizer, "model_max_length", UNLIMITED))
    replicas = ranks // (args.tensor_parallel_size * args.pipeline_parallel_size)
    logical = args.data_parallel_replicas or replicas
    batch = BatchLayout(args.per_device_train_batch_size, logical, args.gradient_accumulation_steps).global_batch
    steps = args.max_steps if args.max_steps > 0 else None
    if steps is None and count_data and tokenizer is not None:
        say = partial(print, file=sys.stderr, flush=True)
        epoch = Epoch(len(prepare(recipe.data, tokenizer, progress=say).train), batch, args.dataloader_drop_last)
        steps = math.ceil(args.num_train_epochs * epoch.steps())
    if active_experts(config) != 1.0:
        notes.append("Experts are planned as on a lazy device, in padded blocks of tokens: an upper bound.")
    device_name = args.device_name
    if device_name == "auto":
        device_name = choose_device("auto")
        other = "--device xla or --device cuda plans for another one"
        notes.append(f"device: auto is {device_name} on this machine; {other}.")
    args = replace(args, device=device_name)  # which says what can be offered
    check_device_has_attention(recipe, device_name)
    device = DEVICES.get(device_name) or PlannedDevice(device_name)  # a native one, which runs operations one by one
    setup = StepSetup(config, args, ranks, block_size, device, recipe.model)
    model_class, counted, elements = _count(setup)
    options = [_measure(setup, each, own=each is args) for each in neighbours(args, ranks)]
    if options[0].impossible is not None:
        raise UsageError(options[0].impossible)
    if device_memory is not None and not options[0].fits(device_memory):
        tried = [one.args for one in options]
        least = min((cost(one.args, args) for one in options if one.fits(device_memory)), default=(2,))
        for settings in (each for each in smaller(args, ranks) if each not in tried and cost(each, args) < least):
            options.append(_measure(setup, settings))
            if options[-1].fits(device_memory):
                break
    size = torch.finfo(getattr(torch, args.dtype)).bits // 8
    optimizer = 0 if args.save_only_model else round(counted.trained * options[0].trace.saved_per_element)
    return Plan(model_class, counted, setup, device_memory, batch, steps, options, elements * size, optimizer, notes)


def _count(setup: StepSetup) -> tuple[str, ModelSize, int]:
    """The model's class, the size of its parameters, and elements of what checkpoints hold: the model with
    its buffers, or its adapter."""
    with FakeTensorMode():
        model = meta_model(setup)
        state = (adapter_of(model) or model).state_dict(keep_vars=True)
        saved = {id(value): value.numel() for value in state.values()}
        inner = getattr(model, "base_model", None) if setup.model.peft is not None else None
        return type(model if inner is None else inner.model).__name__, ModelSize.of(model), sum(saved.values())


def _measure(setup: StepSetup, args: TrainingFields, *, own: bool = False) -> RankMemory:
    """The memory with other arguments than the setup's. `own`: they are the recipe's."""
    if args.sequence_parallel and setup.length % args.tensor_parallel_size:
        reason = f"block_size {setup.length} is not a multiple of tensor_parallel_size {args.tensor_parallel_size}"
        return RankMemory(args, impossible=f"sequence_parallel: {reason}")
    changed = replace(setup, args=args)
    try:
        if changed.staged:
            stages = tuple(trace_stages(changed, every=own))
            return RankMemory(args, max(stages, key=lambda stage: stage.peak), stages=stages)
        return RankMemory(args, trace_deep(changed))
    except UsageError as error:
        return RankMemory(args, impossible=str(error))
