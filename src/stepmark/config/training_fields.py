"""The training fields of a recipe, with the names of transformers' TrainingArguments."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from dataclasses import dataclass
from typing import Annotated, Any

from stepmark.config.activation_checkpointing import checkpointing_options
from stepmark.config.contradictions import LOWER_IS_BETTER, METRIC_SCHEDULES, contradictions
from stepmark.config.fields import (
    ABOVE_0,
    BUCKET,
    FINITE,
    FRACTION,
    INTERVAL,
    LOCAL,
    OR_BOOL,
    PLACE,
    SECONDS,
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
from stepmark.errors import UsageError
from stepmark.filesystem.cache_folder import working_folder
from stepmark.filesystem.local_paths import is_address

GROUP_BY_LENGTH = "group_by_length"
LOG_LEVELS = ("debug", "info", "warning", "error", "critical", "passive")
DEVICES = ("auto", "xla", "cuda", "neuron", "tpu", "xpu", "hpu", "mps", "cpu")  # and what else torch.accelerator has

_STEPS = Values(lambda value: value >= 1 or value == -1, "at least 1, or -1 for num_train_epochs", {"minimum": -1})
_SEED = Values(lambda value: 0 <= value < 2**63, "at least 0 and below 2**63", {"minimum": 0})
_DEADLINE = Values(
    lambda value: 0 < value < float("inf") if isinstance(value, float) else value in ("auto", "off"),
    "auto, off, or a number of seconds above 0",
)
_COUNTED = Values(lambda value: value in (True, False, "no", "all"), "true or all, false or no")
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

    output_dir: Annotated[str, _FOLDER, PLACE] = "trainer_output"
    run_name: str | None = None
    logging_strategy: Annotated[str, one_of("no", "steps", "epoch")] = "steps"
    logging_steps: Annotated[float, INTERVAL] = 500
    logging_first_step: bool = False
    logging_nan_inf_filter: bool = False
    include_num_input_tokens_seen: Annotated[str | bool, _COUNTED] = "no"
    log_format: Annotated[str, one_of("text", "json")] = "text"
    log_level: Annotated[str, one_of(*LOG_LEVELS)] = "passive"
    disable_tqdm: bool | None = None
    report_to: list | str | None = "none"
    prometheus_file: Annotated[str | None, LOCAL] = None

    remove_unused_columns: bool = True
    label_names: list[str] | None = None
    causal_shift: bool | None = None
    dataloader_num_workers: Annotated[int, at_least(0)] = 0
    dataloader_drop_last: bool = False
    train_sampling_strategy: Annotated[str, one_of("random", "sequential", GROUP_BY_LENGTH)] = "random"
    length_column_name: str = "length"

    max_steps: Annotated[int, _STEPS] = -1
    num_train_epochs: Annotated[float, FINITE] = 3.0
    per_device_train_batch_size: Annotated[int, at_least(1)] = 8
    gradient_accumulation_steps: Annotated[int, at_least(1)] = 1
    per_device_eval_batch_size: Annotated[int, at_least(1)] = 8

    learning_rate: Annotated[float, at_least(0), FINITE] = 5e-5
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: dict | str | None = None
    warmup_steps: Annotated[float, at_least(0), FINITE] = 0
    warmup_ratio: Annotated[float, FRACTION] = 0.0
    optim: str = "adamw_torch_fused"
    optim_args: str | None = None
    weight_decay: Annotated[float, at_least(0), FINITE] = 0.0
    adam_beta1: Annotated[float, FRACTION] = 0.9
    adam_beta2: Annotated[float, FRACTION] = 0.999
    adam_epsilon: Annotated[float, at_least(0)] = 1e-8
    max_grad_norm: Annotated[float, at_least(0)] = 1.0
    stop_on_nan: Annotated[int, at_least(0)] = 3
    on_loss_spike: Annotated[str | None, one_of("warn", "rollback")] = None
    loss_spike_threshold: Annotated[float, ABOVE_0, FINITE] = 6.0
    loss_spike_window: Annotated[int, at_least(2)] = 128
    max_rollbacks: Annotated[int, at_least(1)] = 3
    label_smoothing_factor: Annotated[float, FRACTION] = 0.0
    neftune_noise_alpha: Annotated[float | None, at_least(0)] = None
    router_bias_update_rate: Annotated[float, at_least(0), FINITE] = 0.0
    seed: Annotated[int, _SEED] = 42
    data_seed: Annotated[int | None, _SEED] = None

    bf16: bool = False
    fp16: bool = False
    dtype: Annotated[str, one_of("float32", "bfloat16")] = "float32"
    gradient_checkpointing: bool = False
    gradient_checkpointing_kwargs: dict | str | None = None

    device: Annotated[str, _DEVICE] = "auto"
    zero_1: bool = False
    fsdp: Annotated[str | None, OR_BOOL] = None
    fsdp_config: dict | str | None = None
    reduce_dtype: Annotated[str, one_of("float32", "bfloat16")] = "float32"
    ddp_bucket_cap_mb: Annotated[int | None, at_least(1)] = None
    tensor_parallel_size: Annotated[int, at_least(1)] = 1
    sequence_parallel: bool = False
    parallelize_embedding: bool = True
    pipeline_parallel_size: Annotated[int, at_least(1)] = 1
    expert_parallel_size: Annotated[int, at_least(1)] = 1
    data_parallel_replicas: Annotated[int | None, at_least(1)] = None
    pipeline_schedule: Annotated[str, one_of("gpipe", "1f1b", "interleaved")] = "1f1b"
    pipeline_layers: list[int] | None = None
    pipeline_chunks: Annotated[int, at_least(1)] = 1

    torch_compile: bool = False
    torch_compile_backend: str | None = None
    torch_compile_mode: str | None = None

    eval_strategy: Annotated[str, one_of("no", "steps", "epoch")] = "no"
    eval_steps: Annotated[float | None, INTERVAL] = None
    eval_on_start: bool = False
    eval_delay: Annotated[float, at_least(0)] = 0
    sample_prompts: list | str | None = None
    sample_options: dict | str | None = None
    sample_tokens: Annotated[int, at_least(1)] = 64
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    load_best_model_at_end: bool = False

    save_strategy: Annotated[str, one_of("no", "steps", "epoch", "best")] = "steps"
    save_steps: Annotated[float, INTERVAL] = 500
    save_total_limit: Annotated[int | None, at_least(1)] = None
    save_only_model: bool = False
    memory_every: Annotated[int | None, at_least(1)] = None
    mirror_to: Annotated[str | None, BUCKET] = None
    resume_from_checkpoint: Annotated[str | None, OR_BOOL, PLACE] = None
    accept_changes: list | str | None = None
    ignore_data_skip: bool = False
    async_save: bool = True
    save_timeout: Annotated[float, SECONDS] = 1800.0
    step_timeout: Annotated[float | str | None, _DEADLINE] = "auto"
    save_on_signal: bool | None = None
    signal_grace: Annotated[float, SECONDS] = 120.0
    join_timeout: Annotated[float | None, SECONDS] = None
    max_restarts: Annotated[int, at_least(0)] = 0
    compile_cache: Annotated[str | None, OR_BOOL, _FOLDER] = None

    def __post_init__(self) -> None:
        check_fields(self, TrainingFields, self._values())
        self.include_num_input_tokens_seen = "all" if self.include_num_input_tokens_seen in (True, "all") else "no"
        if is_address(self.output_dir):
            if self.mirror_to not in (None, self.output_dir):
                raise UsageError("output_dir and mirror_to: each names a place in object storage; set one of them")
            self.mirror_to, self.output_dir = self.output_dir, str(working_folder(self.output_dir))
        self.output_dir = os.path.abspath(self.output_dir)
        if self.prometheus_file is not None:
            self.prometheus_file = os.path.abspath(self.prometheus_file)
        check_options(self.optim, self.parsed_options("optim_args"))
        self.torch_compile = self.torch_compile or bool(self.torch_compile_backend or self.torch_compile_mode)
        if self.torch_compile:
            self.torch_compile_backend = self.torch_compile_backend or "inductor"
        refuse(contradictions(self, changed(self._values(), TrainingFields)))
        follows = self.load_best_model_at_end or self.lr_scheduler_type in METRIC_SCHEDULES
        if self.metric_for_best_model is None and follows:
            self.metric_for_best_model = "loss"
        if self.metric_for_best_model is None and self.save_strategy == "best":
            raise UsageError("save_strategy: with best, `args.metric_for_best_model` must be provided, such as loss")
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self.greater_is_better = not self.metric_for_best_model.endswith(LOWER_IS_BETTER)
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

    @property
    def place(self) -> str:
        """Where the run is: `output_dir`, or the address that was given for it."""
        address = self.mirror_to
        return address if address and self.output_dir == str(working_folder(address)) else self.output_dir

    @property
    def best_metric_key(self) -> str | None:
        """The name of `metric_for_best_model` in evaluations, with `eval_`; None without such a metric."""
        name = self.metric_for_best_model
        return name if name is None or name.startswith("eval_") else f"eval_{name}"

    def parsed_options(self, field: str) -> dict[str, Any]:
        """`lr_scheduler_kwargs`, `optim_args` or `sample_options` as a mapping."""
        return parse_options(field, getattr(self, field))

    @property
    def checkpointing_options(self) -> dict[str, Any]:
        """`gradient_checkpointing_kwargs` as a mapping."""
        return checkpointing_options(self.gradient_checkpointing_kwargs)

    @property
    def full_sharding(self) -> FullSharding | None:
        """`fsdp` and `fsdp_config`; None where parameters are not sharded."""
        return full_sharding(self.fsdp, self.fsdp_config)

    @property
    def hosts_ranks(self) -> bool:
        """Whether processes may host several data parallel ranks: not where torch adds copies of shards."""
        return (self.full_sharding or FullSharding()).replicas == 1

    @property
    def bucket_elements(self) -> int | None:
        """`ddp_bucket_cap_mb` as a number of float32 elements."""
        return None if self.ddp_bucket_cap_mb is None else self.ddp_bucket_cap_mb * 2**20 // 4

    @property
    def accepted_changes(self) -> list[str]:
        """The names in `accept_changes`."""
        return _names(self.accept_changes)

    @property
    def reporters(self) -> list[str]:
        """The names in `report_to`."""
        return [name for name in _names(self.report_to) if name != "none"]

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


def _names(given: list[Any] | str | None) -> list[str]:
    """Those of a list, or of text with commas between them."""
    return [name.strip() for name in (given.split(",") if isinstance(given, str) else map(str, given or []))]


def set_log_level(args: TrainingFields) -> None:
    """Applies `log_level` to the loggers of Stepmark and transformers; `passive` leaves both as they are."""
    if args.log_level != "passive":
        for name in ("stepmark", "transformers"):
            logging.getLogger(name).setLevel(args.log_level.upper())
