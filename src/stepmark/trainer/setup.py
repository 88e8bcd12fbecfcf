"""The parts of a run, made from its arguments: the model on its mesh, the optimizer, the schedule, the checkpointer."""

from __future__ import annotations

import inspect
import logging
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin, set_seed
from transformers.debug_utils import DebugUnderflowOverflow

from stepmark.checkpoint import Checkpointer, KeepBest, KeepLast, Retention
from stepmark.config.training_fields import TrainingFields, check_reduce_dtype
from stepmark.errors import UsageError
from stepmark.evaluation.run_options import RunOptions
from stepmark.parallel.full_sharding import is_fully_sharded, layer_of
from stepmark.parallel.optimizer.named import NamedOptimizer
from stepmark.parallel.parallelize import ParallelizedModel, check_not_added_to, parallelize, parallelized
from stepmark.parallel.pipeline.staged_model import complete_size, staged
from stepmark.parallel.tensor.adapted_layers import check_adapters
from stepmark.runtime.context import Context
from stepmark.runtime.eager import kept_generators
from stepmark.runtime.mesh import PIPELINE, Mesh
from stepmark.runtime.module_placement import (
    agree_on_tensors,
    agree_on_weights,
    cast_module,
    fetch_module,
    place_module,
)
from stepmark.runtime.seeds import kept_host_generators
from stepmark.sharding.dtensor import is_dtensor, local_of, shard_of
from stepmark.sharding.replication import replication_of
from stepmark.sharding.views import copy_slices
from stepmark.trainer.compat.given_loader import GivenLoader
from stepmark.trainer.loaders import TrainLoader
from stepmark.trainer.run_folder.output_folder import check_no_earlier_run, check_room
from stepmark.trainer.run_folder.run_identity import SPECIAL
from stepmark.trainer.training_arguments import TrainingArguments
from stepmark.training.compiled_layers import check_compiler
from stepmark.training.learning_rate_schedule import build_schedule, warmup_length
from stepmark.training.loss_scaler import LossScaler
from stepmark.training.micro_batches import AroundPasses, autocast_dtype
from stepmark.training.model_options import (
    check_bf16,
    check_fp16,
    check_not_quantized,
    enable_gradient_checkpointing,
)
from stepmark.training.optimizer import build_optimizer, check_step, decays_by_default, parameter_kinds, wrap_optimizer
from stepmark.training.packing_check import check_packing
from stepmark.training.step import TrainStep
from stepmark.training.weighted_loss import MicroBatchLoss

logger = logging.getLogger(__name__)

OPTIMIZER_STATES = 2  # fp32 states of a parameter, as in AdamW


@dataclass(frozen=True)
class RunParts:
    """The parts of one training. `saved` is the module that checkpoints hold: the model, or its adapter. `identity`
    must be the same in a run that resumes; `data` describes the training data, if they are known, `evaluation` how the
    run evaluates."""

    args: TrainingFields
    context: Context
    mesh: Mesh
    model: nn.Module
    saved: nn.Module
    loader: TrainLoader
    optimizer: NamedOptimizer
    schedule: Any
    step: TrainStep
    total_steps: int
    identity: dict[str, Any]
    data: Mapping[str, Any] | None = None
    evaluation: RunOptions | None = None


def made_model(make: Callable[..., nn.Module], seed: int) -> nn.Module:
    """A new model of a `model_init`, seeded as in transformers: every call gives the same weights. Global generators do
    not advance. The function may have one parameter, a trial of a hyperparameter search, which is None.

    Raises UsageError where the function returns something else.
    """
    arguments = [None] if inspect.signature(make).parameters else []
    with kept_host_generators(), kept_generators():
        set_seed(seed)
        made = make(*arguments)
    if not isinstance(made, nn.Module):
        raise UsageError(f"model_init: should return an nn.Module, and returned a {type(made).__name__}")
    return made


def make_again(model: nn.Module, make: Callable[..., nn.Module], seed: int, mesh: Mesh) -> None:
    """Gives `model` the first weights of its `model_init` again. Raises UsageError where it is sharded."""
    sizes = mesh.tensor_parallel.size, mesh.pipeline.size, mesh.expert_parallel_size
    for name, size in zip(("tensor", "pipeline", "expert"), sizes, strict=True):
        if size > 1:
            raise UsageError(f"model_init: with {name}_parallel_size, train() can be called once; make a new Trainer")
    values = made_model(make, seed).state_dict()
    with torch.no_grad():
        for name, own in model.state_dict().items():
            if is_dtensor(own):
                shard = shard_of(own)
                copy_slices(values[name], shard.tensor, shard.layout)
                values[name] = own
        model.load_state_dict(values)


def model_of(model: nn.Module | None, make: Callable[..., nn.Module] | None, seed: int) -> nn.Module:
    """The given model, or the one that `make` makes. Raises UsageError where both or neither was given."""
    if (model is None) == (make is None):
        raise UsageError("model, model_init: a Trainer needs one of them; pass a model, or a function that makes it")
    if make is not None:
        return made_model(make, seed)
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else f"{model!r:.40}"
        raise UsageError(
            f"model: should be a torch.nn.Module, such as what AutoModelForCausalLM.from_pretrained(…) returns, and is "
            f"{given}"
        )
    return model


def count_steps(args: TrainingFields, loader: TrainLoader) -> int:
    """Optimizer steps of the complete run."""
    return args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * loader.steps_per_epoch)


def count_epochs(args: TrainingFields, loader: TrainLoader) -> int:
    """Epochs of the complete run, the last of which may be partial; unlimited where the data have no length."""
    if isinstance(loader, GivenLoader) and not loader.has_length:
        return sys.maxsize
    return max(1, -(-count_steps(args, loader) // loader.steps_per_epoch))


def prepare_model(model: nn.Module, args: TrainingFields, context: Context) -> Mesh:
    """Moves the model to the device with rank 0's weights, sharded as `args` says. Returns its mesh. Collective."""
    applied = parallelized(model)
    check_not_quantized(model)
    if applied is None:
        check_not_added_to(model)
        check_adapters(model, args.tensor_parallel_size, args.pipeline_parallel_size)
    _check_sharding(applied, args, context)
    mesh = applied.mesh if applied else make_mesh(args, context)
    runtime = mesh.runtime
    lazy = runtime.name if runtime.lazy else None
    check_reduce_dtype(args.reduce_dtype, lazy=lazy)
    check_compiler(args, runtime.device.type)
    if applied is None:
        _tie_again(model)
    fetch_module(model, runtime)
    if args.bf16 or args.dtype == "bfloat16":
        check_bf16(runtime.device)
    if args.fp16:
        check_fp16(runtime)
    if args.gradient_checkpointing:
        enable_gradient_checkpointing(model, runtime, args.checkpointing_options)
    if args.dtype == "bfloat16":
        cast_module(model, torch.bfloat16)
    differ = _agree(model, mesh) if applied else agree_on_weights(model, runtime, context.host)
    stages = staged(model)
    if stages is not None:
        ends = [(ranks[0], ranks[-1]) for ranks in mesh.grid.groups(PIPELINE)]
        differ |= agree_on_tensors(stages.tied_parameters(), ends, runtime, context.host)
    if differ and context.host.rank == 0:
        logger.warning("the ranks had different weights; all use those of rank 0")
    if not applied:
        parallelize(model, mesh, **sharding_options(args))
    place_module(model, runtime)
    return mesh


def debug_as_asked(model: nn.Module, args: TrainingArguments, mesh: Mesh) -> None:
    """Applies `debug` to the model, in place; on eager devices."""
    if args.debug and mesh.runtime.lazy:
        raise UsageError(f"debug: would read every activation of a step on {mesh.runtime.name}; leave it out")
    if args.debug:
        DebugUnderflowOverflow(model)


def check_packed(model: nn.Module, *given: Any, may_call: bool = True) -> None:
    """Raises UsageError where a dataset, or one of several by name, has packed conversations and the model's attention
    crosses them. A complete model on the host is called to find out."""
    datasets = [each for one in given for each in (one.values() if isinstance(one, Mapping) else [one])]
    eager = all(parameter.device.type not in ("xla", "meta") for parameter in model.parameters())
    check_packing(model, datasets, whole=may_call and eager and parallelized(model) is None)


def make_mesh(args: TrainingFields, context: Context) -> Mesh:
    """The mesh that the arguments describe. Collective."""
    return Mesh.create(
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        expert_parallel_size=args.expert_parallel_size,
        context=context,
    )


def _agree(model: nn.Module, mesh: Mesh) -> bool:
    """`agree_on_weights`, of a model that is sharded. Collective."""
    size, differ = mesh.tensor_parallel.size, False
    tensors = [each for each in (*model.parameters(), *model.buffers()) if not is_fully_sharded(each)]
    sharded = [each for each in model.parameters() if is_fully_sharded(each)]
    if sharded:
        everybody, copies = mesh.context.host, layer_of(sharded[0]).copies
        shards = everybody.size // copies
        same = [range(first, everybody.size, shards) for first in range(shards)]
        differ = agree_on_tensors([local_of(each) for each in sharded], same, mesh.runtime, everybody)
    for experts in (False, True) if mesh.experts.size > 1 else (False,):
        own = [each for each in tensors if replication_of(each, size).experts == experts]
        differ |= agree_on_tensors(own, mesh.holders(experts), mesh.runtime, mesh.context.host)
    return differ


def sharding_options(args: TrainingFields) -> dict[str, Any]:
    """The arguments of `parallelize`."""
    names = ("sequence_parallel", "parallelize_embedding", "pipeline_layers", "pipeline_chunks")
    return {**{name: getattr(args, name) for name in names}, "fsdp": args.full_sharding}


def _tie_again(model: nn.Module) -> None:
    """Ties weights again: `model.to("xla")` makes new Parameters, and so unties them silently."""
    lazy = any(parameter.device.type == "xla" for parameter in model.parameters())
    tie = getattr(model, "tie_weights", None)
    if lazy and callable(tie):
        tie()


def _check_sharding(applied: ParallelizedModel | None, args: TrainingFields, context: Context) -> None:
    """Raises UsageError where the model is sharded differently from what the arguments say, or for another device."""
    if applied is None:
        return
    made, wanted = applied.mesh.runtime.device.type, context.runtime.device.type
    if made != wanted:
        raise UsageError(f"device: is {wanted}, but the model was made on {made}; make them equal")
    found = {
        "tensor_parallel_size": applied.mesh.tensor_parallel.size,
        "pipeline_parallel_size": applied.mesh.pipeline.size,
        "expert_parallel_size": applied.mesh.expert_parallel_size,
        "pipeline_layers": None if applied.pipeline_layers is None else list(applied.pipeline_layers),
        "pipeline_chunks": applied.pipeline_chunks,
        "sequence_parallel": applied.sequence_parallel,
        "parallelize_embedding": applied.parallelize_embedding,
        "full_sharding": applied.fsdp,
    }
    for name, value in found.items():
        if getattr(args, name) != value:
            name = "fsdp" if name == "full_sharding" else name
            raise UsageError(f"{name}: is {getattr(args, name)}, but the model was made with {value}; make them equal")


def step_optimizer(
    model: nn.Module,
    args: TrainingFields,
    mesh: Mesh,
    given: torch.optim.Optimizer | None = None,
) -> NamedOptimizer:
    """The optimizer that a step needs: around `given`, or the one that the arguments name."""
    if given is not None and args.zero_1:
        raise UsageError(
            "zero_1 and optimizers: an optimizer passed to the Trainer, or made by create_optimizer, keeps its "
            "complete state on every rank; leave one of the two out"
        )
    if given is not None:
        stages = staged(model)
        if stages is not None:
            stages.leave_out_elsewhere(given)
        names = {parameter: name for name, parameter in model.named_parameters()}
        return wrap_optimizer(given, names, mesh, bucket_elements=args.bucket_elements)
    return build_optimizer(
        args.optim,
        list(model.named_parameters()),
        mesh.runtime,
        decay=decays_by_default(model),
        kinds=parameter_kinds(model),
        learning_rate=args.learning_rate,
        weight_decay=args.weight_decay,
        betas=(args.adam_beta1, args.adam_beta2),
        epsilon=args.adam_epsilon,
        options=args.optimizer_options,
        sharded_over=mesh if args.zero_1 else None,
        stages=mesh.context.host if mesh.pipeline.size > 1 else None,
        mesh=mesh,
        bucket_elements=args.bucket_elements,
    )


class RunOptimizer:
    """The optimizer of a Trainer's runs. What was made for the run before is made again; what a user gave stays.
    `given`: a class of optimizers and its arguments, in place of the one that the arguments name."""

    def __init__(self, given: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None) -> None:
        self._given = given
        if given is not None:
            check_step(given[0])
        self.named: NamedOptimizer | None = None  # made last
        self._made: list[Any] = []  # the optimizer and the schedule that were made for the last run

    def create(self, model: nn.Module, args: TrainingFields, mesh: Mesh) -> torch.optim.Optimizer:
        """The optimizer of the given class, or the one that the arguments name."""
        if self._given is not None:
            kind, options = self._given
            decays = decays_by_default(model)
            trained = [(decays(name), each) for name, each in model.named_parameters() if each.requires_grad]
            groups: list[dict[str, Any]] = [{"params": [each for decay, each in trained if decay]}]
            groups.append({"params": [each for decay, each in trained if not decay], "weight_decay": 0.0})
            return kind([group for group in groups if group["params"]], **options)
        self.named = step_optimizer(model, args, mesh)
        return self.named.inner

    def for_run(self, trainer: Any, total_steps: int) -> tuple[NamedOptimizer, Any]:
        """The step's optimizer and the schedule, after `create_optimizer_and_scheduler` of the Trainer.

        Raises UsageError where that has set none.
        """
        names = ("optimizer", "lr_scheduler")
        for name in names:
            if any(getattr(trainer, name) is each for each in self._made):
                setattr(trainer, name, None)
        missing = [name for name in names if getattr(trainer, name) is None]
        trainer.create_optimizer_and_scheduler(total_steps)
        optimizer, schedule = (getattr(trainer, name) for name in names)
        if optimizer is None or schedule is None:
            raise UsageError(
                "create_optimizer_and_scheduler: it has set no optimizer or no lr_scheduler; set both attributes"
            )
        self._made = [getattr(trainer, name) for name in missing]
        if self.named is None or self.named.inner is not optimizer or _has_other_tensors(self.named):
            return step_optimizer(trainer.model, trainer.args, trainer.mesh, optimizer), schedule
        return self.named, schedule


def _has_other_tensors(optimizer: NamedOptimizer) -> bool:
    """Whether a user has added tensors to the groups, or removed some."""
    own = {id(held.tensor) for held in optimizer.distribution.held}
    return own != {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}


def make_step(
    model: nn.Module,
    optimizer: NamedOptimizer,
    loss: MicroBatchLoss,
    mesh: Mesh,
    args: TrainingFields,
    around: AroundPasses | None = None,
) -> TrainStep:
    """The step that the arguments describe."""
    return TrainStep(
        model,
        optimizer,
        loss,
        mesh,
        accumulation=args.gradient_accumulation_steps,
        pipeline_schedule=args.pipeline_schedule,
        max_grad_norm=args.max_grad_norm,
        autocast=autocast_dtype(bf16=args.bf16, fp16=args.fp16),
        scaler=LossScaler(ranks=mesh.data_parallel.size) if args.fp16 else None,
        around=around,
        reduce_dtype=getattr(torch, args.reduce_dtype),
        seed=args.seed,
        router_bias_update_rate=args.router_bias_update_rate,
    )


def make_schedule(args: TrainingFields, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
    """The schedule that the arguments name."""
    warmup = warmup_length(args.warmup_steps, args.warmup_ratio, total_steps)
    return build_schedule(args.lr_scheduler_type, optimizer, total_steps, warmup, args.scheduler_options)


def make_checkpointer(folder: Path, args: TrainingFields, mesh: Mesh) -> Checkpointer:
    """A checkpointer with the retention that the arguments ask for."""
    keep: list[Retention] = []
    if args.save_total_limit is not None:
        keep.append(KeepLast(args.save_total_limit))
        if args.best_metric_key is not None:
            keep.append(KeepBest(args.best_metric_key, bool(args.greater_is_better)))
    return Checkpointer(
        folder,
        keep=keep,
        group=mesh.context.host,
        runtime=mesh.runtime,
        async_save=args.async_save,
        save_timeout=args.save_timeout,
        mesh=mesh.shape,
    )


def check_start(folder: Path, model: nn.Module, args: TrainingFields, context: Context, *, resumes: bool) -> None:
    """Raises an error where the folder has another run's checkpoints, or no room for one. Collective."""
    if args.save_strategy == "no":
        return
    check_no_earlier_run(folder, args, resumes=resumes)
    states = 0 if args.save_only_model else OPTIMIZER_STATES
    size = complete_size(model)
    check_room(folder, size.nbytes + 4 * states * size.elements, context.host)


def align_special_tokens(model: nn.Module, processing_class: Any) -> None:
    """Copies the tokenizer's EOS, BOS and padding token ids to the model's configurations, as transformers' Trainer
    does. A generation configuration with several EOS tokens keeps them."""
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
            before = getattr(each, name, None)
            if each is None or before == token or (isinstance(before, list) and token in before):
                continue
            setattr(each, name, [token, *before] if isinstance(before, list) else token)
            changed[name] = token
    if changed:
        found = ", ".join(f"{name}: {token}" for name, token in changed.items())
        logger.info("the model's configuration now has the tokenizer's special tokens: %s", found)
