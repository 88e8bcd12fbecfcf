"""The training fields of a recipe, with the names of transformers' TrainingArguments."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from dataclasses import dataclass
from typing import Any

from stepmark.config.activation_checkpointing import check_checkpointing, checkpointing_options
from stepmark.config.coercion import BOOL_TOO, convert_all, field_names
from stepmark.config.optimizers import check_options
from stepmark.config.option_text import parse_options
from stepmark.config.reduce_dtypes import check_reduce_dtype
from stepmark.config.transformers_defaults import AcceptingDefaults
from stepmark.errors import UsageError

STRATEGIES = ("no", "steps", "epoch")
METRIC_SCHEDULES = ("reduce_lr_on_plateau", "greedy")  # lr_scheduler_types that follow evaluations
PIPELINE_SCHEDULES = ("gpipe", "1f1b", "interleaved")
GROUP_BY_LENGTH = "group_by_length"
SAMPLING_STRATEGIES = ("random", "sequential", GROUP_BY_LENGTH)
LOG_LEVELS = ("debug", "info", "warning", "error", "critical", "passive")


@dataclass
class TrainingFields(metaclass=AcceptingDefaults):
    """The training fields of a recipe, with the names, meanings and defaults of transformers' TrainingArguments.

    Steps are optimizer steps. `logging_steps`, `eval_steps` and `save_steps` below 1 are fractions of all steps. The
    fields that transformers does not have, or that mean more here:

    Args:
        output_dir: The run's folder; a relative path is relative to the current folder. All ranks have to see it.
        max_steps: Steps of the run; -1 (the default) trains for `num_train_epochs` instead.
        device: `auto` (the default), `xla`, `cuda`, `neuron` or `cpu`.
        log_format: Lines on stderr as `text` (the default) or as one `json` object each.
        prometheus_file: Where to keep the newest metrics in Prometheus's text format, such as a `.prom` file in the
            folder of node_exporter's textfile collector. Default: None.
        dtype: The type of the parameters: `float32` (the default), or `bfloat16` with fp32 master weights in the
            optimizer. `bf16` is autocast over float32 parameters instead.
        fp16: float16 autocast over float32 parameters, with a dynamic loss scale, on GPUs and the CPU. Default: false.
        gradient_checkpointing_kwargs: With `gradient_checkpointing`, options of `torch.utils.checkpoint`:
            `use_reentrant` (default: false), `preserve_rng_state`, `determinism_check` and `debug`. On lazy devices
            torch_xla's own function is used, whatever `use_reentrant` says, and the last two are errors. Default: None.
        zero_1: Shards the optimizer's states over the data parallel ranks. Default: false.
        reduce_dtype: The type in which data parallel ranks send each other gradients, on eager devices: `float32` (the
            default), or `bfloat16` for half the bytes. Sums are in float32 in either case.
        ddp_bucket_cap_mb: How much data parallel ranks send of gradients at a time, and with `zero_1` of new values: in
            MiB of float32. A larger parameter is sent in one piece. Another size rounds the gradient's norm
            differently. Default (None): by the device: 24 between hosts, 32 between accelerators, 128 in the graph of a
            lazy device.
        tensor_parallel_size: Neighbouring ranks that hold the model together, each a shard of it; data parallelism uses
            the remaining factor of the world size. Default: 1.
        sequence_parallel: Shards activations along the sequence too, between the layers' matrix products. Default:
            false.
        parallelize_embedding: Shards embedding, head and loss along the vocabulary too. Default: true.
        pipeline_parallel_size: Ranks among which the layers are divided, each a stage of the model. The micro-batches
            that go through them are those of `gradient_accumulation_steps`. Default: 1.
        pipeline_schedule: In which order: `1f1b` (the default), `gpipe`, or `interleaved` with several stages on each
            rank.
        pipeline_layers: The number of layers of each stage. Default (None): so that all stages cost as much, the
            embedding, the head and the loss counted.
        pipeline_chunks: Stages on each rank, 2 or more with the interleaved schedule. Default: 1.
        train_sampling_strategy: `random` (the default), `sequential`, or `group_by_length`: samples of about the same
            length come in the same step. Lengths are those of a column `length_column_name`, else of `input_ids`, or of
            what the tokenizer or processor names first, for which every sample is read once at the start.
        length_column_name: Default: `length`.
        ignore_data_skip: A resumed run begins the epoch that it was in again, and ends after as many steps as without
            this. Default: false: it takes the next batch.
        async_save: Training continues while a checkpoint is written. A callback that defines `on_save` is called once
            the checkpoint is complete on disk, so that it may read it and add files to it; training waits for that.
            Default: true.
        save_timeout: Seconds that each phase of a save or restore may take, and that a rank may be without a
            heartbeat, before the run ends with an error that names the late rank. Default: 1800.
        step_timeout: Seconds after which a step, or anything else that training does but a save, ends the run, with an
            error that names the rank that the others wait for; `auto` (the default): 100 times the usual step, or the
            longest wait for data, at least 300 seconds, of steps and data alone; `off`: never. A tenth of that is
            only reported.
        save_on_signal: SIGTERM, SIGUSR1, SIGHUP or SIGINT (Ctrl-C) stops the run after the current step, saves, and
            ends it with exit code 75; a second SIGINT ends it at once. Default (None): true, but false where
            `save_strategy` is `no` or with `save_only_model`, since such a run is not meant to be resumed.
        signal_grace: Seconds from the signal until the run has to have ended; a save that does not fit is not begun.
            Default: 120.
        join_timeout: Seconds that the ranks may take to find each other at the start. Default (None): the environment
            variable STEPMARK_JOIN_TIMEOUT, or 600.
        max_restarts: Under `--nproc`: ranks that die are started again, from the newest complete checkpoint, until so
            many restarts in a row did not get past the step that failed. Default: 0.
        stop_on_nan: Ends the run with an error after so many steps in a row whose loss or gradient norm is not finite,
            at the next log, evaluation or save, before anything is saved; at the end of the run after one. Steps that
            the loss scale of `fp16` leaves out do not count; 0: never. Default: 3.
        sample_prompts: Texts that the model continues at each evaluation, greedily: events of the run, which the report
            shows. Needs a causal model that every rank holds completely. Default: None.
        sample_tokens: By how many tokens. Default: 64.
        compile_cache: On lazy devices, the folder that keeps compiled graphs (for Neuron also an `s3://` URL), true for
            the one beside the token cache, false for none. Default (None): true, but false on XLA's CPU client, which
            cannot read compiled graphs back.

    Raises:
        UsageError: A value has the wrong type or is out of range, or two fields contradict each other. The message
            names the field.
    """

    output_dir: str = "trainer_output"
    max_steps: int = -1
    num_train_epochs: float = 3.0
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    learning_rate: float = 5e-5
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: dict | str | None = None
    warmup_steps: float = 0
    warmup_ratio: float = 0.0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    optim: str = "adamw_torch_fused"
    optim_args: str | None = None
    label_smoothing_factor: float = 0.0
    neftune_noise_alpha: float | None = None
    bf16: bool = False
    fp16: bool = False
    gradient_checkpointing: bool = False
    gradient_checkpointing_kwargs: dict | str | None = None
    logging_strategy: str = "steps"
    logging_steps: float = 500
    logging_first_step: bool = False
    save_strategy: str = "steps"
    save_steps: float = 500
    save_total_limit: int | None = None
    save_only_model: bool = False
    async_save: bool = True
    save_timeout: float = 1800.0
    step_timeout: float | str | None = "auto"  # text second: HfArgumentParser reads that
    save_on_signal: bool | None = None
    signal_grace: float = 120.0
    join_timeout: float | None = None
    max_restarts: int = 0
    stop_on_nan: int = 3
    eval_strategy: str = "no"
    eval_steps: float | None = None
    eval_on_start: bool = False
    eval_delay: float = 0
    sample_prompts: list | str | None = None  # text second: HfArgumentParser reads that
    sample_tokens: int = 64
    load_best_model_at_end: bool = False
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    resume_from_checkpoint: str | None = None  # or true; HfArgumentParser reads no union with bool
    ignore_data_skip: bool = False
    seed: int = 42
    data_seed: int | None = None
    report_to: list | str | None = "none"  # text second: HfArgumentParser reads that
    run_name: str | None = None
    dataloader_num_workers: int = 0
    dataloader_drop_last: bool = False
    train_sampling_strategy: str = "random"
    length_column_name: str = "length"
    remove_unused_columns: bool = True
    label_names: list[str] | None = None
    disable_tqdm: bool | None = None
    log_format: str = "text"
    prometheus_file: str | None = None
    log_level: str = "passive"
    device: str = "auto"
    dtype: str = "float32"
    zero_1: bool = False
    reduce_dtype: str = "float32"
    ddp_bucket_cap_mb: int | None = None
    tensor_parallel_size: int = 1
    sequence_parallel: bool = False
    parallelize_embedding: bool = True
    pipeline_parallel_size: int = 1
    pipeline_schedule: str = "1f1b"
    pipeline_layers: list[int] | None = None
    pipeline_chunks: int = 1
    compile_cache: str | None = None  # or true, or false

    def __post_init__(self) -> None:
        given = self._values()
        own = {name: given[name] for name in field_names(TrainingFields)}  # not those of a subclass
        for name, value in convert_all(TrainingFields, own).items():
            setattr(self, name, value)
        for name in BOOL_TOO:
            setattr(self, name, _bool_or_path(getattr(self, name)))
        if not self.output_dir.strip():
            raise UsageError("output_dir: is empty; name the folder that the run writes to")
        self.output_dir = os.path.abspath(self.output_dir)
        if isinstance(self.compile_cache, str) and not self.compile_cache.strip():
            raise UsageError("compile_cache: is empty; name a folder, or set it to true or false")
        if self.prometheus_file is not None:
            self.prometheus_file = os.path.abspath(self.prometheus_file)
        _check_ranges(self)
        _check_agreement(self)
        if self.metric_for_best_model is None and self._follows_metric():
            self.metric_for_best_model = "loss"
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")
        if self.save_on_signal is None:
            self.save_on_signal = self.save_strategy != "no" and not self.save_only_model
        if self.eval_strategy == "steps" and self.eval_steps is None:
            self.eval_steps = self.logging_steps

    def _values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def device_name(self) -> str:
        """`device` as it was given: `auto`, or a type of devices."""
        return self.device

    def _follows_metric(self) -> bool:
        return self.load_best_model_at_end or self.save_strategy == "best" or self.lr_scheduler_type in METRIC_SCHEDULES

    @property
    def best_metric_key(self) -> str | None:
        """The name of `metric_for_best_model` in evaluations, with `eval_`; None without such a metric."""
        name = self.metric_for_best_model
        return name if name is None or name.startswith("eval_") else f"eval_{name}"

    @property
    def scheduler_options(self) -> dict[str, Any]:
        """`lr_scheduler_kwargs` as a mapping."""
        options = self.lr_scheduler_kwargs
        return parse_options("lr_scheduler_kwargs", options) if isinstance(options, str) else dict(options or {})

    @property
    def checkpointing_options(self) -> dict[str, Any]:
        """`gradient_checkpointing_kwargs` as a mapping."""
        return checkpointing_options(self.gradient_checkpointing_kwargs)

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """`optim_args` as a mapping."""
        return parse_options("optim_args", self.optim_args or "")

    @property
    def bucket_elements(self) -> int | None:
        """`ddp_bucket_cap_mb` as a number of float32 elements."""
        return None if self.ddp_bucket_cap_mb is None else self.ddp_bucket_cap_mb * 2**20 // 4

    @property
    def reporters(self) -> list[str]:
        """The names in `report_to`."""
        names = [self.report_to] if isinstance(self.report_to, str) else list(self.report_to or [])
        return [name for name in names if name != "none"]

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values."""
        return self._values()

    def to_sanitized_dict(self) -> dict[str, Any]:
        """All fields as types that TensorBoard's hyperparameters support."""
        return {
            name: value if isinstance(value, (bool, int, float, str)) else str(value)
            for name, value in self._values().items()
        }

    def to_json_string(self) -> str:
        """All fields as JSON."""
        return json.dumps(self._values(), indent=2)


def _bool_or_path(value: Any) -> Any:
    """A path, or true or false, also as text, which a flag of a script gives."""
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def _check_ranges(args: TrainingFields) -> None:
    at_least = {
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "learning_rate": 0,
        "warmup_steps": 0,
        "weight_decay": 0,
        "max_grad_norm": 0,
        "dataloader_num_workers": 0,
        "adam_epsilon": 0,
        "neftune_noise_alpha": 0,
        "eval_delay": 0,
        "seed": 0,
        "data_seed": 0,
        "max_restarts": 0,
        "stop_on_nan": 0,
        "save_total_limit": 1,
        "ddp_bucket_cap_mb": 1,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "pipeline_chunks": 1,
    }
    for name, least in at_least.items():
        value = getattr(args, name)
        if value is not None and not value >= least:
            raise UsageError(f"{name}: should be at least {least}, and is {value}")
    if args.max_steps < 1 and args.max_steps != -1:
        raise UsageError(f"max_steps: should be at least 1, or -1 for num_train_epochs epochs, and is {args.max_steps}")
    for name in ("save_timeout", "signal_grace", "join_timeout"):
        if getattr(args, name) is not None and not 0 < getattr(args, name) < math.inf:
            raise UsageError(f"{name}: should be a number of seconds above 0, and is {getattr(args, name)}")
    seconds = args.step_timeout
    if not (0 < seconds < math.inf if isinstance(seconds, float) else seconds in ("auto", "off")):
        raise UsageError(f"step_timeout: should be auto, off, or a number of seconds above 0, and is {seconds!r}")
    for name in ("learning_rate", "weight_decay", "warmup_steps", "num_train_epochs"):
        if not math.isfinite(getattr(args, name)):
            raise UsageError(f"{name}: should be a finite number, and is {getattr(args, name)}")
    for name in ("seed", "data_seed"):
        if (getattr(args, name) or 0) >= 2**63:
            raise UsageError(f"{name}: should be below 2**63, and is {getattr(args, name)}")
    for name in ("logging_steps", "save_steps", "eval_steps"):
        value = getattr(args, name)
        if value is not None and not (0 < value < 1 or (value >= 1 and value % 1 == 0)):
            raise UsageError(f"{name}: should be a whole number of steps, or a fraction below 1, and is {value}")
    for name in ("warmup_ratio", "label_smoothing_factor", "adam_beta1", "adam_beta2"):
        if not 0 <= getattr(args, name) < 1:
            raise UsageError(f"{name}: should be from 0 to below 1, and is {getattr(args, name)}")
    choices = {
        "logging_strategy": STRATEGIES,
        "eval_strategy": STRATEGIES,
        "save_strategy": (*STRATEGIES, "best"),
        "dtype": ("float32", "bfloat16"),
        "log_level": LOG_LEVELS,
        "log_format": ("text", "json"),
        "pipeline_schedule": PIPELINE_SCHEDULES,
        "train_sampling_strategy": SAMPLING_STRATEGIES,
    }
    for name, accepted in choices.items():
        if getattr(args, name) not in accepted:
            raise UsageError(f"{name}: {getattr(args, name)!r} is unknown; choose one of {', '.join(accepted)}")


def _check_agreement(args: TrainingFields) -> None:
    if args.max_steps == -1 and args.num_train_epochs <= 0:
        raise UsageError(
            f"num_train_epochs: should be above 0 where max_steps does not give the length of the run, and is "
            f"{args.num_train_epochs:g}"
        )
    if args.bf16 and args.dtype == "bfloat16":
        raise UsageError(
            "bf16 and dtype: bf16 is autocast over float32 parameters, and dtype asks for bfloat16 ones; set one of "
            "them"
        )
    if args.fp16 and (args.bf16 or args.dtype == "bfloat16"):
        raise UsageError(
            f"fp16 and {'bf16' if args.bf16 else 'dtype'}: matrix products are in float16 or in bfloat16; set one of "
            "them"
        )
    check_options(args.optim, args.optimizer_options)
    check_reduce_dtype(args.reduce_dtype, lazy="xla" if args.device_name == "xla" else None)
    check_checkpointing(args.checkpointing_options, args.pipeline_parallel_size)
    if args.save_on_signal and args.save_only_model:
        raise UsageError(
            "save_on_signal and save_only_model: a checkpoint of the model alone cannot be resumed from; set one of "
            "them"
        )
    for name, default in (("sequence_parallel", False), ("parallelize_embedding", True)):
        if args.tensor_parallel_size == 1 and getattr(args, name) != default:
            raise UsageError(
                f"{name} and tensor_parallel_size: {name} applies to a model that several ranks hold together; set "
                "tensor_parallel_size to 2 or more, or leave it out"
            )
    _check_pipeline(args)
    _check_sharded(args)
    _check_samples(args)
    if args.warmup_steps and args.warmup_ratio:
        raise UsageError("warmup_steps and warmup_ratio: both give the length of the warm-up; set one of them")
    if args.eval_strategy == "no":
        for name in ("load_best_model_at_end", "eval_on_start"):
            if getattr(args, name):
                raise UsageError(
                    f"{name} and eval_strategy: {name} needs evaluations; set eval_strategy to steps or epoch"
                )
        if args.save_strategy == "best":
            raise UsageError("save_strategy and eval_strategy: evaluations find the best model; set eval_strategy")
        if args.lr_scheduler_type in METRIC_SCHEDULES:
            raise UsageError(
                f"lr_scheduler_type and eval_strategy: {args.lr_scheduler_type} follows evaluations; set eval_strategy"
            )
    if args.load_best_model_at_end and args.save_strategy != "best":
        _check_best_is_saved(args)


def _check_sharded(args: TrainingFields) -> None:
    """What needs a complete model on every rank."""
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if args.neftune_noise_alpha is not None and getattr(args, name) > 1:
            raise UsageError(
                f"neftune_noise_alpha and {name}: ranks that hold the model together would add different noise; leave "
                "one of them out"
            )


def _check_samples(args: TrainingFields) -> None:
    prompts = args.sample_prompts
    if args.sample_tokens < 1:
        raise UsageError(f"sample_tokens: should be at least 1, and is {args.sample_tokens}")
    if prompts is None:
        return
    listed = [prompts] if isinstance(prompts, str) else prompts
    if not listed or not all(isinstance(prompt, str) and prompt for prompt in listed):
        raise UsageError(f"sample_prompts: should be one or more texts, and is {prompts!r}")
    if args.eval_strategy == "no":
        raise UsageError("sample_prompts and eval_strategy: they are continued at evaluations; set eval_strategy")
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(args, name) > 1:
            raise UsageError(
                f"sample_prompts and {name}: the model that continues them has to be complete on a rank; leave one of "
                "them out"
            )


def _check_pipeline(args: TrainingFields) -> None:
    ranks, chunks, interleaved = args.pipeline_parallel_size, args.pipeline_chunks, "interleaved"
    if ranks == 1:
        for name, default in (("pipeline_schedule", "1f1b"), ("pipeline_layers", None), ("pipeline_chunks", 1)):
            if getattr(args, name) != default:
                raise UsageError(
                    f"{name} and pipeline_parallel_size: {name} applies to a model that is cut into stages; set "
                    "pipeline_parallel_size to 2 or more, or leave it out"
                )
        return
    if (chunks > 1) != (args.pipeline_schedule == interleaved):
        raise UsageError(
            f"pipeline_schedule and pipeline_chunks: interleaved runs several stages on a rank, the other schedules "
            f"one, but they are {args.pipeline_schedule} and {chunks}; set pipeline_chunks to 2 or more for "
            "interleaved, and to 1 otherwise"
        )
    micro_batches = args.gradient_accumulation_steps
    if micro_batches < ranks:
        raise UsageError(
            f"gradient_accumulation_steps and pipeline_parallel_size: {micro_batches} micro-batches are fewer than "
            f"{ranks} pipeline ranks, some of which would always wait; set gradient_accumulation_steps to {ranks} or "
            "more"
        )
    if args.pipeline_schedule == interleaved and micro_batches % ranks:
        raise UsageError(
            f"gradient_accumulation_steps and pipeline_parallel_size: the interleaved schedule needs a multiple of "
            f"{ranks} micro-batches, and there are {micro_batches}; set it to {-(-micro_batches // ranks) * ranks}, or "
            "pipeline_schedule to 1f1b"
        )
    sizes = args.pipeline_layers
    whole = sizes is not None and all(isinstance(size, int) and size >= 1 for size in sizes)
    if sizes is not None and (len(sizes) != ranks * chunks or not whole):
        raise UsageError(
            f"pipeline_layers: {list(sizes)} should have {ranks * chunks} numbers of 1 or more, one for each stage "
            "(pipeline_parallel_size times pipeline_chunks)"
        )


def _check_best_is_saved(args: TrainingFields) -> None:
    if args.save_strategy != args.eval_strategy:
        raise UsageError(
            f"load_best_model_at_end: every evaluated model has to be saved, but save_strategy is {args.save_strategy} "
            f"and eval_strategy is {args.eval_strategy}; make them equal, or set save_strategy to best"
        )
    evaluated = args.eval_steps or args.logging_steps
    if args.save_strategy == "steps" and not _is_multiple(args.save_steps, evaluated):
        raise UsageError(
            f"load_best_model_at_end: save_steps ({args.save_steps:g}) has to be a multiple of eval_steps "
            f"({evaluated:g}), both whole numbers or both fractions, so that what is saved was evaluated"
        )


def _is_multiple(value: float, of: float) -> bool:
    """Whether an interval, in steps or as a fraction of the run, is a multiple of another; 0.3 is one of 0.1."""
    return (value < 1) == (of < 1) and abs(value / of - round(value / of)) < 1e-9


def set_log_level(args: TrainingFields) -> None:
    """Applies `log_level` to the loggers of Stepmark and transformers; `passive` leaves both as they are."""
    if args.log_level != "passive":
        for name in ("stepmark", "transformers"):
            logging.getLogger(name).setLevel(args.log_level.upper())
