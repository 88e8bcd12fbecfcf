"""The model of a run: made where a function makes it, and placed on its mesh with the weights of rank 0."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin, set_seed
from transformers.debug_utils import DebugUnderflowOverflow

from stepmark.config.contradictions import SHARING
from stepmark.config.training_fields import TrainingFields
from stepmark.errors import UsageError
from stepmark.parallel.full_sharding import is_fully_sharded, layer_of
from stepmark.parallel.parallelize import ParallelizedModel, check_adapted, parallelize, parallelized
from stepmark.parallel.pipeline.staged_model import staged
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
from stepmark.sharding.logical_ranks import FIELD
from stepmark.sharding.replication import replication_of
from stepmark.sharding.views import copy_slices
from stepmark.trainer.run_folder.run_identity import SPECIAL
from stepmark.trainer.training_arguments import TrainingArguments
from stepmark.training.model_options import check_bf16, check_fp16, check_not_quantized, enable_gradient_checkpointing
from stepmark.training.packing_check import check_packing

logger = logging.getLogger(__name__)


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
    for name, size in mesh.sharing.items():
        if size > 1:
            raise UsageError(f"model_init: with {name}, train() can be called once; make a new Trainer")
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


def prepare_model(model: nn.Module, args: TrainingArguments, context: Context) -> Mesh:
    """Moves the model to the device with rank 0's weights, sharded as `args` says. Returns its mesh. Collective."""
    applied = parallelized(model)
    check_not_quantized(model)
    if applied is None:
        check_adapted(model, args.tensor_parallel_size, args.pipeline_parallel_size)
        tie = getattr(model, "tie_weights", None)
        if callable(tie) and any(parameter.device.type == "xla" for parameter in model.parameters()):
            tie()  # `model.to("xla")` makes new Parameters, and so unties them silently
    _check_sharding(applied, args, context)
    mesh = applied.mesh if applied else make_mesh(args, context)
    runtime = mesh.runtime
    fetch_module(model, runtime)
    if args.bf16 or args.dtype == "bfloat16":
        check_bf16(runtime.device)
    if args.fp16:
        check_fp16(runtime)
    if args.debug and runtime.lazy:
        raise UsageError(f"debug: would read every activation of a step on {runtime.name}; leave it out")
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
    if args.debug:
        DebugUnderflowOverflow(model)
    return mesh


def check_packed(model: nn.Module, *given: Any, may_call: bool = True) -> None:
    """Raises UsageError where a dataset, or one of several by name, has packed conversations and the model's attention
    crosses them. A complete model on the host is called to find out."""
    datasets = [each for one in given for each in (one.values() if isinstance(one, Mapping) else [one])]
    eager = all(parameter.device.type not in ("xla", "meta") for parameter in model.parameters())
    check_packing(model, datasets, whole=may_call and eager and parallelized(model) is None)


def make_mesh(args: TrainingFields, context: Context) -> Mesh:
    """The mesh that the arguments describe. Collective."""
    return Mesh.create(context=context, **{name: getattr(args, name) for name in (*SHARING, "data_parallel_replicas")})


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
    """The arguments of `parallelize`, by their names there."""
    names = ("sequence_parallel", "parallelize_embedding", "pipeline_layers", "pipeline_chunks")
    return {**{name: getattr(args, name) for name in names}, "fsdp": args.full_sharding}


def _check_sharding(applied: ParallelizedModel | None, args: TrainingFields, context: Context) -> None:
    """Raises UsageError where the model is sharded differently from what the arguments say, or for another device."""
    if applied is None:
        return
    made, wanted = applied.mesh.runtime.device.type, context.runtime.device.type
    if made != wanted:
        raise UsageError(f"device: is {wanted}, but the model was made on {made}; make them equal")
    mesh, options = applied.mesh, sharding_options(args)
    sizes = {**mesh.sharing, FIELD: mesh.ranks.total if mesh.ranks.given else None}
    asked = {**{name: getattr(args, name) for name in sizes}, **options}
    found = {**sizes, **{name: getattr(applied, name) for name in options}}
    for name, value in found.items():
        if asked[name] != value:
            raise UsageError(f"{name}: is {asked[name]}, but the model was made with {value}; make them equal")


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
