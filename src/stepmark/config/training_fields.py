"""The training fields of a recipe, with the names of transformers' TrainingArguments."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from dataclasses import dataclass
from typing import Annotated, Any

from stepmark.config.activation_checkpointing import checkpointing_options
from stepmark.config.contradictions import METRIC_SCHEDULES, contradictions
from stepmark.config.fields import (
    ABOVE_0,
    FINITE,
    FRACTION,
    INTERVAL,
    LOCAL,
    OR_BOOL,
    SECONDS,
    Help,
    Section,
    Values,
    at_least,
    changed,
    check_fields,
    documented,
    one_of,
    refuse,
)
from stepmark.config.full_sharding import FullSharding, full_sharding
from stepmark.config.optimizers import check_options
from stepmark.config.transformers_defaults import AcceptingDefaults
from stepmark.config.yaml_file import parse_options

GROUP_BY_LENGTH = "group_by_length"
LOG_LEVELS = ("debug", "info", "warning", "error", "critical", "passive")
DEVICES = ("auto", "xla", "cuda", "neuron", "tpu", "xpu", "hpu", "mps", "cpu")  # and what else torch.accelerator has

_STEPS = Values(lambda value: value >= 1 or value == -1, "at least 1, or -1 for num_train_epochs", {"minimum": -1})
_SEED = Values(lambda value: 0 <= value < 2**63, "at least 0 and below 2**63", {"minimum": 0})
_DEADLINE = Values(
    lambda value: 0 < value < float("inf") if isinstance(value, float) else value in ("auto", "off"),
    "auto, off, or a number of seconds above 0",
)
_FOLDER = Values(lambda value: not isinstance(value, str) or bool(value.strip()), "the path of a folder")
_DEVICE = Values(lambda value: True, "", {"enum": [*DEVICES]})  # checked where it is used


@documented
@dataclass
class TrainingFields(metaclass=AcceptingDefaults):
    """The training fields of a recipe, with the names, meanings and defaults of transformers' TrainingArguments.

    Raises:
        UsageError: A value has the wrong type or is out of range, or two fields contradict each other. The message
            names the field.
    """

    # Of a field that may be text and of another type, text comes second: HfArgumentParser reads the last but None.

    # fmt: off
    output_dir: Annotated[str, _FOLDER, LOCAL, Section("output and logs"), Help(
        "folder of the run; all ranks must see it", "runs/first")] = "trainer_output"
    run_name: Annotated[str | None, Help("name of the run for report_to", "first")] = None
    logging_strategy: Annotated[str, one_of("no", "steps", "epoch"), Help("when to log", "epoch")] = "steps"
    logging_steps: Annotated[float, INTERVAL, Help("steps between logs; below 1: a fraction of all steps", "10")] = 500
    logging_first_step: Annotated[bool, Help("log the first step too", "true")] = False
    log_format: Annotated[str, one_of("text", "json"), Help(
        "format of the lines on stderr; json: one object per line", "json")] = "text"
    log_level: Annotated[str, one_of(*LOG_LEVELS), Help(
        "log level; passive: leave the loggers as they are", "info")] = "passive"
    disable_tqdm: Annotated[bool | None, Help("show no progress bar", "true")] = None
    report_to: Annotated[list | str | None, Help("loggers of transformers to report to", "tensorboard")] = "none"
    prometheus_file: Annotated[str | None, LOCAL, Help(
        "keep the newest metrics in this file, in Prometheus's text format", "/var/lib/node/run.prom",
        more="Such as a .prom file in the folder of node_exporter's textfile collector.")] = None

    remove_unused_columns: Annotated[bool, Section("data"), Help(
        "drop columns of a Dataset that the model does not take (Python only)", "false")] = True
    label_names: Annotated[list[str] | None, Help(
        "model inputs that are labels", "[labels]", "those that the model's class names")] = None
    causal_shift: Annotated[bool | None, Help(
        "whether position t predicts label t + 1, so that the first label of a row is no target", "true",
        "what the loss, the Trainer or the model declares by an attribute of this name, else what the model's class "
        "shows, else false")] = None
    dataloader_num_workers: Annotated[int, at_least(0), Help(
        "worker processes that load batches; 0: load in the training process", "2")] = 0
    dataloader_drop_last: Annotated[bool, Help("drop the last, smaller batch of an epoch", "true")] = False
    train_sampling_strategy: Annotated[str, one_of("random", "sequential", GROUP_BY_LENGTH), Help(
        "order of the samples; group_by_length: samples of similar length in the same step", "sequential",
        more="Lengths are those of the column length_column_name, else of input_ids, or of the first input that the "
        "tokenizer or processor names, for which every sample is read once at the start.")] = "random"
    length_column_name: Annotated[str, Help(
        "column of a Dataset that holds lengths (Python only)", "tokens")] = "length"

    max_steps: Annotated[int, _STEPS, Section("length and batch"), Help(
        "number of optimizer steps; -1: use num_train_epochs", "1000")] = -1
    num_train_epochs: Annotated[float, FINITE, Help("passes over the data if max_steps is -1", "1")] = 3.0
    per_device_train_batch_size: Annotated[int, at_least(1), Help("samples per device in one forward pass", "16")] = 8
    gradient_accumulation_steps: Annotated[int, at_least(1), Help("micro-batches per optimizer step", "4")] = 1
    per_device_eval_batch_size: Annotated[int, at_least(1), Help("samples per device in evaluations", "16")] = 8

    learning_rate: Annotated[float, at_least(0), FINITE, Section("optimization"), Help(
        "peak learning rate", "3e-4")] = 5e-5
    lr_scheduler_type: Annotated[str, Help(
        "learning rate schedule: linear, cosine, constant_with_warmup, …", "cosine")] = "linear"
    lr_scheduler_kwargs: Annotated[dict | str | None, Help("options of the schedule", "{num_cycles: 2}")] = None
    warmup_steps: Annotated[float, at_least(0), FINITE, Help(
        "warmup steps; below 1: a fraction of all steps", "100")] = 0
    warmup_ratio: Annotated[float, FRACTION, Help("warmup as a fraction of all steps", "0.1")] = 0.0
    optim: Annotated[str, Help(
        "adamw_torch, adamw_torch_fused, adamw_8bit, adafactor, muon or sgd", "adamw_torch")] = "adamw_torch_fused"
    optim_args: Annotated[str | None, Help("options of the optimizer", '"momentum=0.9"')] = None
    weight_decay: Annotated[float, at_least(0), FINITE, Help("decoupled weight decay", "0.1")] = 0.0
    adam_beta1: Annotated[float, FRACTION, Help("AdamW's decay rate of the first moment", "0.9")] = 0.9
    adam_beta2: Annotated[float, FRACTION, Help("AdamW's decay rate of the second moment", "0.95")] = 0.999
    adam_epsilon: Annotated[float, at_least(0), Help("AdamW's epsilon", "1e-6")] = 1e-8
    max_grad_norm: Annotated[float, at_least(0), Help("clip gradients to this L2 norm; 0: never", "0.5")] = 1.0
    stop_on_nan: Annotated[int, at_least(0), Help(
        "fail after this many consecutive steps with a non-finite loss or gradient; 0: never", "10",
        more="At the next log, evaluation or save, before anything is saved; at the end of the run after one such "
        "step. Steps that the loss scale of fp16 skips do not count.")] = 3
    on_loss_spike: Annotated[str | None, one_of("warn", "rollback"), Help(
        "what to do about a step whose loss or gradient norm jumps", "rollback", "nothing",
        more="rollback returns to the last checkpoint from before it, and goes on with the samples after it.")] = None
    loss_spike_threshold: Annotated[float, ABOVE_0, FINITE, Help(
        "standard deviations above the mean of the last steps from which a step is a spike", "8")] = 6.0
    loss_spike_window: Annotated[int, at_least(2), Help(
        "number of last steps that a step is compared with; at least half of them are needed", "256")] = 128
    max_rollbacks: Annotated[int, at_least(1), Help(
        "rollbacks of a run after which the next spike ends it", "10")] = 3
    label_smoothing_factor: Annotated[float, FRACTION, Help("label smoothing", "0.1")] = 0.0
    neftune_noise_alpha: Annotated[float | None, at_least(0), Help(
        "scale of NEFTune noise on input embeddings in training", "5", "no noise")] = None
    router_bias_update_rate: Annotated[float, at_least(0), FINITE, Help(
        "step by which routers' e_score_correction_bias follows the load of experts; 0: it stays", "0.001",
        more="Auxiliary-loss-free balancing as in DeepSeek-V3: after each update, the bias of an expert with fewer "
        "tokens than the mean of its layer rises, and that of one with more falls.")] = 0.0
    seed: Annotated[int, _SEED, Help("seed of new weights, dropout and the order of samples", "1")] = 42
    data_seed: Annotated[int | None, _SEED, Help("seed of the order of samples", "2", "seed")] = None

    bf16: Annotated[bool, Section("precision and memory"), Help(
        "bfloat16 autocast over float32 parameters", "true")] = False
    fp16: Annotated[bool, Help(
        "float16 autocast over float32 parameters, with a dynamic loss scale", "true",
        more="On GPUs and the CPU.")] = False
    dtype: Annotated[str, one_of("float32", "bfloat16"), Help(
        "type of the parameters; bfloat16: with float32 master weights in the optimizer", "bfloat16")] = "float32"
    gradient_checkpointing: Annotated[bool, Help(
        "recompute activations in the backward pass instead of storing them", "true")] = False
    gradient_checkpointing_kwargs: Annotated[dict | str | None, Help(
        "options of torch.utils.checkpoint", "{use_reentrant: true}",
        more="use_reentrant (default: false), preserve_rng_state, determinism_check and debug. Lazy devices use "
        "torch_xla's function, whatever use_reentrant says, and refuse the last two.")] = None

    device: Annotated[str, _DEVICE, Section("device and parallelism"), Help("device to train on", "cpu")] = "auto"
    zero_1: Annotated[bool, Help("shard optimizer states over the data parallel ranks (ZeRO-1)", "true")] = False
    fsdp: Annotated[str | None, OR_BOOL, Help(
        "shard parameters, gradients and optimizer states over the data parallel ranks: true or full_shard, "
        "shard_grad_op, hybrid_shard or hybrid_shard_zero2", "full_shard",
        more="By torch's fully_shard, layer by layer, on eager devices. shard_grad_op keeps complete parameters from "
        "the forward to the backward pass; hybrid shards within each machine.")] = None
    fsdp_config: Annotated[dict | str | None, Help(
        "options of fsdp", "{dp_replicate_size: 2}",
        more="reshard_after_forward, transformer_layer_cls_to_wrap, and dp_replicate_size, the number of groups of "
        "ranks that each hold all shards.")] = None
    reduce_dtype: Annotated[str, one_of("float32", "bfloat16"), Help(
        "type in which gradients are sent between ranks; bfloat16: half the bytes", "bfloat16",
        more="Eager devices only. Sums are in float32 in either case.")] = "float32"
    ddp_bucket_cap_mb: Annotated[int | None, at_least(1), Help(
        "MiB of float32 gradients, with zero_1 also of parameters, that ranks send at a time", "8",
        "24 between hosts, 32 between accelerators, 128 on lazy devices",
        "A larger parameter is sent in one piece. Another size rounds the gradient's norm differently.")] = None
    tensor_parallel_size: Annotated[int, at_least(1), Help(
        "ranks that hold one replica of the model together", "4",
        more="Neighbouring ranks, each with a shard; data parallelism uses the remaining factor of the world "
        "size.")] = 1
    sequence_parallel: Annotated[bool, Help(
        "with tensor parallelism, also shard activations along the sequence", "true")] = False
    parallelize_embedding: Annotated[bool, Help(
        "with tensor parallelism, also shard embedding, head and loss along the vocabulary", "false")] = True
    pipeline_parallel_size: Annotated[int, at_least(1), Help(
        "ranks among which the layers are divided as pipeline stages", "2",
        more="The micro-batches of gradient_accumulation_steps go through them.")] = 1
    expert_parallel_size: Annotated[int, at_least(1), Help(
        "ranks over which the experts of a mixture are divided", "4",
        more="Of tensor times data parallel ranks; tensor parallel ones first.")] = 1
    pipeline_schedule: Annotated[str, one_of("gpipe", "1f1b", "interleaved"), Help(
        "order of the stages' passes; interleaved: several stages on each rank", "interleaved")] = "1f1b"
    pipeline_layers: Annotated[list[int] | None, Help(
        "number of layers of each stage", "[9, 9, 9, 5]", "balanced by cost, embedding, head and loss included")] = None
    pipeline_chunks: Annotated[int, at_least(1), Help(
        "stages on each rank, 2 or more with the interleaved schedule", "2")] = 1

    torch_compile: Annotated[bool, Section("torch.compile"), Help(
        "compile the model's layers with torch.compile", "true", "whether one of the next two is set",
        "Eager devices only: lazy ones compile every step. Evaluations run the model uncompiled.")] = False
    torch_compile_backend: Annotated[str | None, Help(
        "backend of torch.compile", "neuron", "inductor, where the model is compiled")] = None
    torch_compile_mode: Annotated[str | None, Help(
        "mode of torch.compile", "max-autotune-no-cudagraphs", "that of torch.compile")] = None

    eval_strategy: Annotated[str, one_of("no", "steps", "epoch"), Section("evaluation"), Help(
        "when to evaluate", "steps")] = "no"
    eval_steps: Annotated[float | None, INTERVAL, Help(
        "steps between evaluations; below 1: a fraction of all steps", "100", "logging_steps")] = None
    eval_on_start: Annotated[bool, Help("evaluate before the first step", "true")] = False
    eval_delay: Annotated[float, at_least(0), Help(
        "steps, or epochs with eval_strategy epoch, before the first evaluation", "1000")] = 0
    sample_prompts: Annotated[list | str | None, Help(
        "prompts that the model continues at each evaluation", '["def ", "class "]',
        more="The report shows the continuations. Needs a causal model that every rank holds completely.")] = None
    sample_options: Annotated[dict | str | None, Help(
        "sampling of the continuations: do_sample, temperature, top_k, top_p, min_p",
        "{do_sample: true, temperature: 0.8}", "greedy")] = None
    sample_tokens: Annotated[int, at_least(1), Help("tokens to generate for each prompt", "32")] = 64
    metric_for_best_model: Annotated[str | None, Help(
        "metric that decides which model is best", "loss", "loss, where a best model is asked for")] = None
    greater_is_better: Annotated[bool | None, Help(
        "whether greater values of that metric are better", "false", "unless it ends in loss")] = None
    load_best_model_at_end: Annotated[bool, Help("end with the best model instead of the last", "true")] = False

    save_strategy: Annotated[str, one_of("no", "steps", "epoch", "best"), Section("checkpoints"), Help(
        "when to save", "epoch")] = "steps"
    save_steps: Annotated[float, INTERVAL, Help("steps between saves; below 1: a fraction of all steps", "100")] = 500
    save_total_limit: Annotated[int | None, at_least(1), Help(
        "number of newest checkpoints to keep", "3", "all")] = None
    save_only_model: Annotated[bool, Help(
        "save only weights; such a checkpoint cannot be resumed from", "true")] = False
    resume_from_checkpoint: Annotated[str | None, OR_BOOL, LOCAL, Help(
        "checkpoint to resume from; true: the newest valid one", "true")] = None
    accept_changes: Annotated[list | str | None, Help(
        "what a resumption changes on purpose: data, model, optim, seed or tokenizer", "data,seed", "nothing",
        more="New data, or data in another order, begin with the first sample of the epoch; an optimizer whose "
        "states do not fit begins without any. The run records what has changed.")] = None
    ignore_data_skip: Annotated[bool, Help(
        "resume at the beginning of the epoch instead of at the next batch", "true",
        more="The run ends after as many steps as without this.")] = False
    async_save: Annotated[bool, Help(
        "write checkpoints while training continues", "false",
        more="A callback that defines on_save is called once the checkpoint is complete on disk, so that it may read "
        "it and add files to it; training waits for that.")] = True
    save_timeout: Annotated[float, SECONDS, Help(
        "timeout of each phase of a save or restore, and of a rank's heartbeat, in seconds", "600",
        more="The run then ends with an error that names the late rank.")] = 1800.0
    step_timeout: Annotated[float | str | None, _DEADLINE, Help(
        "timeout of a step, in seconds; auto: 100 times the usual step, at least 300 s; off: none", "1800",
        more="Also of anything else that training does but a save; with auto, of steps and data alone, for which the "
        "longest wait for data counts as well. The error names the rank that the others wait for. A tenth of it is "
        "only reported.")] = "auto"
    save_on_signal: Annotated[bool | None, Help(
        "on SIGTERM, SIGUSR1, SIGHUP or Ctrl-C, save after the current step and exit with code 75", "false",
        "true, unless nothing is saved that can be resumed from",
        "A second SIGINT ends the run at once.")] = None
    signal_grace: Annotated[float, SECONDS, Help(
        "seconds between the signal and the end of the run", "30",
        more="A save that does not fit is not begun.")] = 120.0
    join_timeout: Annotated[float | None, SECONDS, Help(
        "timeout of the ranks' rendezvous, in seconds", "120", "STEPMARK_JOIN_TIMEOUT, or 600")] = None
    max_restarts: Annotated[int, at_least(0), Help(
        "with --nproc, restart failed ranks; give up after this many restarts in a row without progress", "3",
        more="From the newest complete checkpoint. Progress is a step beyond the one that failed.")] = 0
    compile_cache: Annotated[str | None, OR_BOOL, _FOLDER, Help(
        "folder of compiled graphs of lazy devices and torch.compile; on Neuron also an s3:// URL; false: none",
        "s3://bucket/graphs", "true, the one beside the token cache; on XLA's CPU client, false",
        "XLA's CPU client cannot read compiled graphs back. Of torch.compile's backends inductor keeps them.")] = None
    # fmt: on

    def __post_init__(self) -> None:
        check_fields(self, TrainingFields, self._values())
        self.output_dir = os.path.abspath(self.output_dir)
        if self.prometheus_file is not None:
            self.prometheus_file = os.path.abspath(self.prometheus_file)
        check_options(self.optim, self.optimizer_options)
        self.torch_compile = self.torch_compile or bool(self.torch_compile_backend or self.torch_compile_mode)
        if self.torch_compile:
            self.torch_compile_backend = self.torch_compile_backend or "inductor"
        refuse(contradictions(self, changed(self._values(), TrainingFields)))
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
        return parse_options("lr_scheduler_kwargs", self.lr_scheduler_kwargs)

    @property
    def sampling(self) -> dict[str, Any]:
        """`sample_options` as a mapping."""
        return parse_options("sample_options", self.sample_options)

    @property
    def checkpointing_options(self) -> dict[str, Any]:
        """`gradient_checkpointing_kwargs` as a mapping."""
        return checkpointing_options(self.gradient_checkpointing_kwargs)

    @property
    def full_sharding(self) -> FullSharding | None:
        """`fsdp` and `fsdp_config`; None where parameters are not sharded."""
        return full_sharding(self.fsdp, self.fsdp_config)

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """`optim_args` as a mapping."""
        return parse_options("optim_args", self.optim_args)

    @property
    def bucket_elements(self) -> int | None:
        """`ddp_bucket_cap_mb` as a number of float32 elements."""
        return None if self.ddp_bucket_cap_mb is None else self.ddp_bucket_cap_mb * 2**20 // 4

    @property
    def accepted_changes(self) -> list[str]:
        """The names in `accept_changes`."""
        given = self.accept_changes or []
        return [name.strip() for name in (given.split(",") if isinstance(given, str) else map(str, given))]

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


def set_log_level(args: TrainingFields) -> None:
    """Applies `log_level` to the loggers of Stepmark and transformers; `passive` leaves both as they are."""
    if args.log_level != "passive":
        for name in ("stepmark", "transformers"):
            logging.getLogger(name).setLevel(args.log_level.upper())
