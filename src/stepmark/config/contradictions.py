"""What training fields cannot ask for together, or of a type of devices, each as the text of an error."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from stepmark.config.optimizers import WHOLE_PARAMETERS

LOWER_IS_BETTER = ("loss", "perplexity", "bits_per_byte")  # ends of names of metrics
METRIC_SCHEDULES = ("reduce_lr_on_plateau", "greedy")  # lr_scheduler_types that follow evaluations
CHANGES = ("data", "model", "optim", "seed", "tokenizer")  # that a resumption may accept
SHARING = ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size")  # ranks that share a replica
_OF_SEVERAL_RANKS = {
    "tensor_parallel_size": ("sequence_parallel", "parallelize_embedding"),
    "pipeline_parallel_size": ("pipeline_schedule", "pipeline_layers", "pipeline_chunks"),
}


def contradictions(args: Any, given: Collection[str]) -> Iterator[str]:
    """What fields of `TrainingFields` cannot both ask for; `given`: the names of those that are not their defaults."""
    if args.max_steps == -1 and args.num_train_epochs <= 0:
        yield f"num_train_epochs: should be above 0 if max_steps is -1, and is {args.num_train_epochs:g}"
    if args.bf16 and args.dtype == "bfloat16":
        yield "bf16 and dtype: bf16 is autocast over float32 parameters, which dtype makes bfloat16; set one of them"
    if args.fp16 and (args.bf16 or args.dtype == "bfloat16"):
        other = "bf16" if args.bf16 else "dtype"
        yield f"fp16 and {other}: matrix products are in float16 or in bfloat16; set one of them"
    yield from device_contradictions(args, args.device_name)
    if args.save_on_signal and args.save_only_model:
        yield "save_on_signal and save_only_model: weights alone cannot be resumed from; set one of them"
    yield from _spike_contradictions(args, given)
    for name, set_ in {"save_only_model": args.save_only_model, "save_strategy": args.save_strategy == "no"}.items():
        if args.memory_every is not None and set_:
            yield f"memory_every and {name}: snapshots are of the steps after a complete checkpoint; leave one out"
    for name in args.accepted_changes:
        if name not in CHANGES:
            yield f"accept_changes: {name!r} is unknown; choose among {', '.join(CHANGES)}"
    if args.warmup_steps and args.warmup_ratio:
        yield "warmup_steps and warmup_ratio: both give the length of the warmup; set one of them"
    if args.full_sharding is not None:
        yield from _not_with_fsdp(args)
    if args.torch_compile and args.expert_parallel_size > 1:
        yield "torch_compile and expert_parallel_size: what experts exchange was not compiled yet; set one of them"
    if args.optim in WHOLE_PARAMETERS and args.tensor_parallel_size % args.expert_parallel_size:
        yield (
            f"expert_parallel_size and optim: {args.optim} uses complete parameters, of which data parallel ranks have "
            "different experts; use adamw_torch or sgd, or a divisor of tensor_parallel_size"
        )
    for size, names in _OF_SEVERAL_RANKS.items():
        for name in names if getattr(args, size) == 1 else ():
            if name in given:
                yield f"{name} and {size}: set {size} to 2 or more, or leave {name} out"
    if args.checkpointing_options and args.pipeline_parallel_size > 1:
        yield (
            "gradient_checkpointing_kwargs and pipeline_parallel_size: a stage recomputes its complete forward pass, "
            "without torch.utils.checkpoint; set one of them"
        )
    if args.pipeline_parallel_size > 1:
        yield from _pipeline_contradictions(args)
    for name in SHARING:
        if args.neftune_noise_alpha is not None and getattr(args, name) > 1:
            yield f"neftune_noise_alpha and {name}: ranks of one replica would add different noise; set one of them"
        if args.sample_prompts is not None and getattr(args, name) > 1:
            yield f"sample_prompts and {name}: prompts need a complete model on every rank; set one of them"
    prompts = [args.sample_prompts] if isinstance(args.sample_prompts, str) else args.sample_prompts
    if prompts is not None and not (prompts and all(isinstance(prompt, str) and prompt for prompt in prompts)):
        yield f"sample_prompts: should be one or more texts, and is {args.sample_prompts!r}"
    if args.sample_options is not None and prompts is None:
        yield "sample_options: is for sample_prompts; set them, or leave it out"
    if args.eval_strategy == "no":
        yield from _needs_evaluations(args)
    if args.load_best_model_at_end and args.save_strategy != "best":
        yield from _best_is_not_saved(args)


def device_contradictions(args: Any, device: str) -> Iterator[str]:
    """What the fields cannot ask of devices of this type; nothing for `auto`."""
    if device != "xla":
        return
    if args.torch_compile:
        yield "torch_compile and device: xla is lazy and compiles every step itself; leave torch_compile out"
    if args.full_sharding is not None:
        yield "fsdp and device: lazy devices cannot free parameters within a graph; use zero_1, or leave fsdp out"
    yield from reduction_contradictions(args.reduce_dtype, device)


def reduction_contradictions(dtype: str, device: str) -> Iterator[str]:
    """Why gradients are not sent in this type by a lazy device."""
    if dtype != "float32":
        yield (
            f"reduce_dtype: {device} adds gradients in the type in which they are sent, so {dtype} would lose what "
            "float32 sums keep; leave it out"
        )


def _spike_contradictions(args: Any, given: Collection[str]) -> Iterator[str]:
    needed = {"loss_spike_threshold": args.on_loss_spike, "loss_spike_window": args.on_loss_spike}
    for name, used in {**needed, "max_rollbacks": args.on_loss_spike == "rollback"}.items():
        if name in given and not used:
            yield f"{name} and on_loss_spike: is {args.on_loss_spike}; set on_loss_spike, or leave {name} out"
    if args.on_loss_spike == "rollback" and (args.save_strategy == "no" or args.save_only_model):
        name = "save_strategy" if args.save_strategy == "no" else "save_only_model"
        yield f"on_loss_spike and {name}: a rollback needs complete checkpoints; set one of them"


def _not_with_fsdp(args: Any) -> Iterator[str]:
    if args.torch_compile:
        yield "torch_compile and fsdp: leave one of them out"
    if args.zero_1:
        yield "zero_1 and fsdp: fsdp shards optimizer states too; leave zero_1 out"
    if args.data_parallel_replicas is not None and not args.hosts_ranks:
        yield "fsdp and data_parallel_replicas: torch adds copies of the shards in its own order; leave one of them out"
    for name in SHARING:
        if getattr(args, name) > 1:
            yield f"fsdp and {name}: both shard parameters; leave one of them out"
    if args.optim in WHOLE_PARAMETERS:
        yield f"fsdp and optim: {args.optim} uses complete parameters; use adamw_torch or sgd, or zero_1"
    if args.sample_prompts is not None:
        yield "sample_prompts and fsdp: prompts need a complete model on every rank; set one of them"


def _needs_evaluations(args: Any) -> Iterator[str]:
    for name in ("load_best_model_at_end", "eval_on_start", "sample_prompts"):
        if getattr(args, name):
            yield f"{name} and eval_strategy: {name} needs evaluations; set eval_strategy to steps or epoch"
    if args.save_strategy == "best":
        yield "save_strategy and eval_strategy: evaluations find the best model; set eval_strategy"
    if args.lr_scheduler_type in METRIC_SCHEDULES:
        yield f"lr_scheduler_type and eval_strategy: {args.lr_scheduler_type} follows evaluations; set eval_strategy"


def _pipeline_contradictions(args: Any) -> Iterator[str]:
    ranks, chunks, sizes = args.pipeline_parallel_size, args.pipeline_chunks, args.pipeline_layers
    yield from schedule_contradictions(args.pipeline_schedule, args.gradient_accumulation_steps, ranks, chunks)
    whole = sizes is None or all(isinstance(size, int) and size >= 1 for size in sizes)
    if sizes is not None and (len(sizes) != ranks * chunks or not whole):
        yield (
            f"pipeline_layers: {list(sizes)} should have {ranks * chunks} numbers of 1 or more, one for each stage "
            "(pipeline_parallel_size times pipeline_chunks)"
        )


def schedule_contradictions(schedule: str, micro_batches: int, ranks: int, chunks: int) -> Iterator[str]:
    """Why a step of this many micro-batches has no such schedule."""
    interleaved, both = "interleaved", "gradient_accumulation_steps and pipeline_parallel_size"
    if (chunks > 1) != (schedule == interleaved):
        yield (
            f"pipeline_schedule and pipeline_chunks: are {schedule} and {chunks}; set pipeline_chunks to 2 or more for "
            "interleaved, and to 1 for other schedules"
        )
    if micro_batches < ranks:
        yield (
            f"{both}: {micro_batches} micro-batches are fewer than {ranks} pipeline ranks, some of which would always "
            f"wait; set gradient_accumulation_steps to {ranks} or more"
        )
    if schedule == interleaved and micro_batches % ranks:
        yield (
            f"{both}: the interleaved schedule needs a multiple of {ranks} micro-batches, and there are "
            f"{micro_batches}; set it to {-(-micro_batches // ranks) * ranks}, or pipeline_schedule to 1f1b"
        )


def _best_is_not_saved(args: Any) -> Iterator[str]:
    if args.save_strategy != args.eval_strategy:
        yield (
            f"load_best_model_at_end: every evaluated model has to be saved, but save_strategy is {args.save_strategy} "
            f"and eval_strategy is {args.eval_strategy}; make them equal, or set save_strategy to best"
        )
    save, evaluate = args.save_steps, args.eval_steps or args.logging_steps
    same_unit = (save < 1) == (evaluate < 1)  # steps, or fractions of the run; 0.3 is a multiple of 0.1
    if args.save_strategy == "steps" and not (same_unit and abs(save / evaluate - round(save / evaluate)) < 1e-9):
        yield (
            f"load_best_model_at_end: save_steps ({save:g}) has to be a multiple of eval_steps ({evaluate:g}), both "
            "whole numbers or both fractions, so that what is saved was evaluated"
        )
