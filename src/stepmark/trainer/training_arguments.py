"""Training arguments: a recipe's training fields, and what scripts for transformers read besides."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from stepmark.config.training_fields import LOG_LEVELS, TrainingFields
from stepmark.config.transformers_defaults import LATE, is_absent, options_of_transformers, set_absent
from stepmark.errors import UsageError
from stepmark.launch.accelerate_variables import asked_by_accelerate
from stepmark.launch.world import World

if TYPE_CHECKING:
    import torch

ALONE = -1  # `local_rank` of a run of one rank


@dataclass(repr=False)
class TrainingArguments(options_of_transformers(TrainingFields), TrainingFields):  # type: ignore[misc]
    """The training fields of a recipe (`TrainingFields`), and what scripts for transformers read besides.

    Args:
        parameter_dtype: Another name of `dtype`, for `transformers.HfArgumentParser`: many scripts have a dataclass
            with a field `dtype`. Default: `dtype`.
        do_train: Whether the script should train. Only the script reads it, like the next two. Default: false.
        do_eval: Whether the script should evaluate. Default: whether there is an `eval_strategy`.
        do_predict: Whether the script should predict. Default: false.
        local_rank: This rank's number on its machine, which the launcher sets; -1 for a run of one rank.
        restore_callback_states_from_checkpoint: Restore the constructor arguments of callbacks, such as a patience, on
            resuming, and not only their counters. Default: false.
        prediction_loss_only: Compute only the loss in evaluations and `predict`. Default: false.
        include_for_metrics: Further inputs of `compute_metrics`: `inputs` (the model's main input) and `loss` (of each
            sample's batch). Default: none.
        batch_eval_metrics: Call `compute_metrics(prediction, compute_result=…)` for each batch, with tensors of all
            ranks; with `compute_result`, for the last batch, it returns the metrics. Default: false.
        eval_do_concat_batches: Concatenate the predictions and labels of all samples. Otherwise they are lists with an
            item for each batch of each rank, in order. Default: true.
        push_to_hub: Upload the model to the Hugging Face hub, by `push_to_hub` and as `hub_strategy` says. Default:
            false.
        hub_model_id: The repository; default: the name of `output_dir`.
        hub_strategy: `every_save` (the default) uploads the model of each checkpoint in the background; `checkpoint`
            also the checkpoint as `last-checkpoint`, `all_checkpoints` under its own name; `end` nothing before
            `push_to_hub`.
        hub_token: A token with write permission; default: that of `hf auth login`.
        hub_private_repo: Whether a new repository is private; default: as the hub's organization says.
        hub_always_push: Upload a checkpoint even while the previous one is uploading. Default: false.
        hub_revision: The branch; default: the main one.
        debug: `underflow_overflow`: transformers' DebugUnderflowOverflow watches the model, on eager devices. Default:
            nothing.
        skip_memory_metrics: Leave the memory that each stage allocated out of the results. Default: true.
        log_on_each_node: Whether the first rank of each machine logs, or only rank 0. Default: true.
        save_on_each_node: Accepted where all ranks are on one machine, where it has no effect. Default: false.

    Raises:
        UsageError: As `TrainingFields`.
    """

    dtype: str = field(default="float32", init=False)  # no option of HfArgumentParser
    parameter_dtype: str | None = None
    do_train: bool = False
    do_eval: bool = False
    do_predict: bool = False
    local_rank: int = ALONE
    restore_callback_states_from_checkpoint: bool = False
    prediction_loss_only: bool = False
    include_for_metrics: list[str] | None = None
    batch_eval_metrics: bool = False
    eval_do_concat_batches: bool = True
    push_to_hub: bool = False
    hub_model_id: str | None = None
    hub_strategy: str = "every_save"
    hub_token: str | None = None
    hub_private_repo: bool | None = None
    hub_always_push: bool = False
    hub_revision: str | None = None
    debug: str | list[str] = ""
    skip_memory_metrics: bool = True
    log_on_each_node: bool = True
    save_on_each_node: bool = False

    def __new__(cls, *_: Any, **__: Any) -> Self:
        for kind in cls.__mro__[: cls.__mro__.index(TrainingArguments)]:
            if isinstance(vars(kind).get("device"), str):  # a default, which the constructor has already
                kind.device = TrainingArguments.device  # type: ignore[attr-defined]
        return super().__new__(cls)

    def __post_init__(self) -> None:
        from transformers import integrations
        from transformers.debug_utils import DebugOption

        self._take_dtype()
        if self.output_dir is None:
            self.output_dir = TrainingFields.output_dir
        self._take_variables()
        super().__post_init__()
        names, known = self.debug.split() if isinstance(self.debug, str) else self.debug or [], "underflow_overflow"
        if set(names) - {known}:
            raise UsageError(f"debug: {names} is not supported; choose {known}, or leave it out")
        self.debug = [DebugOption(name) for name in names]
        self.lr_scheduler_kwargs, self.report_to = self.parsed_options("lr_scheduler_kwargs") or None, self.reporters
        if getattr(integrations, "is_kubeflow_available", bool)() and "kubeflow" not in self.report_to:
            self.report_to.append("kubeflow")
        self.gradient_checkpointing_kwargs = self.checkpointing_options or None
        self.include_for_metrics = list(self.include_for_metrics or [])
        unknown = sorted(set(self.include_for_metrics) - {"inputs", "loss"})
        if unknown:
            raise UsageError(f"include_for_metrics: {unknown[0]!r} is unknown; choose inputs, loss or both")
        self.hub_strategy = getattr(self.hub_strategy, "value", self.hub_strategy)
        self.do_eval = self.do_eval or self.eval_strategy != "no"
        world = World.from_environment()
        launched = world.local_rank if world.size > 1 else ALONE
        if self.local_rank not in (ALONE, launched, world.local_rank):
            raise UsageError(f"local_rank: is {self.local_rank}, but the launcher says {launched}; leave it out")
        self.local_rank = launched
        self.parameter_dtype = self.dtype
        if self.dataloader_prefetch_factor is not None and not self.dataloader_num_workers:
            raise UsageError("dataloader_prefetch_factor: needs workers; set dataloader_num_workers, or leave it out")
        if self.use_cpu:
            self.dataloader_pin_memory = False

    def _take_variables(self) -> None:
        """What `accelerate launch` asks for, where the arguments do not say otherwise."""
        asked = asked_by_accelerate()
        if self.dtype == "float32" and not self.bf16 and not self.fp16:
            self.bf16, self.fp16 = asked.bf16, asked.fp16
        if asked.cpu and self.device_name == "auto":
            self.device = "cpu"

    def _take_dtype(self) -> None:
        """`dtype` as it was given to the constructor, under either name; that of torch becomes its name."""
        given = self.__dict__.pop(LATE, {}).get("dtype")
        given = self.dtype if given is None else given
        if type(given).__module__ == "torch":
            given = str(given).removeprefix("torch.")
        other = self.parameter_dtype
        if other is not None and given not in ("float32", other):
            raise UsageError(f"dtype, parameter_dtype: they are the same, and are {given} and {other}; leave one out")
        self.dtype = given if other is None else other

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises UsageError for an argument of transformers that would have no effect."""
        if name == "save_on_each_node" and value and (world := World.from_environment()).local_size < world.size:
            raise UsageError(
                "save_on_each_node: output_dir is one folder that all machines see, in which a checkpoint is written "
                "once, by all ranks together; leave it out"
            )
        if is_absent(type(self), name):
            set_absent(self, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def use_cpu(self) -> bool:
        """Whether `device` is `cpu`."""
        return self.device_name == "cpu"

    @property
    def activation_checkpointing(self) -> bool:
        """`gradient_checkpointing`."""
        return self.gradient_checkpointing

    @property
    def activation_checkpointing_kwargs(self) -> Any:
        """`gradient_checkpointing_kwargs`."""
        return self.gradient_checkpointing_kwargs

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._values().items())})"

    # The device, which transformers gives as an object. Given and kept is its name.

    @property  # type: ignore[misc, override]
    def device(self) -> torch.device:
        """The device of this rank.

        Raises:
            DeviceError: There is no such device.
        """
        import torch

        from stepmark.runtime.device import choose_device

        kind = choose_device(self.device_name)
        return torch.device(kind) if kind in ("cpu", "xla") else torch.device(kind, max(self.local_rank, 0))

    @device.setter
    def device(self, value: Any) -> None:
        self._device_name = value if isinstance(value, str) else getattr(value, "type", value)

    @property
    def device_name(self) -> str:
        return self._device_name

    @property
    def n_gpu(self) -> int:
        """The accelerators of this process: 1, or 0 on the CPU and lazy devices."""
        return int(self.device.type not in ("cpu", "xla"))

    # This process among the ranks

    @property
    def world_size(self) -> int:
        """The number of ranks, of which `tensor_parallel_size` hold one replica of the model together."""
        return World.from_environment().size

    @property
    def process_index(self) -> int:
        """This rank."""
        return World.from_environment().rank

    @property
    def local_process_index(self) -> int:
        """This rank's number on its machine, from 0."""
        return World.from_environment().local_rank

    @property
    def parallel_mode(self) -> Any:
        """transformers' ParallelMode: NOT_PARALLEL for one rank, otherwise DISTRIBUTED."""
        from transformers.training_args import ParallelMode

        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def should_log(self) -> bool:
        """Whether this is the first rank of its machine, or with `log_on_each_node=False` rank 0."""
        return (self.local_process_index if self.log_on_each_node else self.process_index) == 0

    @property
    def should_save(self) -> bool:
        """Whether this is rank 0, which writes what a script writes itself."""
        return self.process_index == 0

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Inside the block, the other ranks wait until rank 0 has left it, or the first rank of their machine.
        Collective: every rank enters it.

        Args:
            local: Whether the first rank of each machine goes first, instead of only rank 0.
            desc: Names the work in the error where the first rank fails.

        Raises:
            UsageError: On the waiting ranks, the block has failed on the first one.
        """
        if self.world_size == 1:
            yield
            return
        from stepmark.runtime.context import start

        host = start(self.device_name, self.join_timeout).host
        first = (self.local_process_index if local else self.process_index) == 0
        said: str | None = None
        if first:
            try:
                yield
            except BaseException as error:
                said = f"rank {self.process_index}: {error}"
                raise
            finally:
                host.all_gather(said)
            return
        said = next(filter(None, host.all_gather(said)), None)
        if said is not None:
            raise UsageError(f"main_process_first: {desc} has failed on {said}")
        yield

    # Numbers

    @property
    def train_batch_size(self) -> int:
        """Samples of a rank's micro-batch: `per_device_train_batch_size`."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Samples of a rank's batch in evaluations: `per_device_eval_batch_size`."""
        return self.per_device_eval_batch_size

    def get_process_log_level(self) -> int:
        """This rank's logging level: `log_level` (`passive`: transformers' own), or WARNING where it does not log."""
        if not self.should_log:
            return logging.WARNING
        if self.log_level == LOG_LEVELS[-1]:
            from transformers.utils import logging as transformers_logging

            return int(transformers_logging.get_verbosity())
        return int(getattr(logging, self.log_level.upper()))

    def _values(self) -> dict[str, Any]:
        names = [field.name for field in dataclasses.fields(self) if not is_absent(type(self), field.name)]
        values = {name: getattr(self, name) for name in names if name != "device"}
        secret = {} if self.hub_token is None else {"hub_token": "<HUB_TOKEN>"}
        return {**values, "device": self.device_name, **secret}


@dataclass(repr=False)
class Seq2SeqTrainingArguments(TrainingArguments):
    """The arguments of a `Seq2SeqTrainer`.

    Args:
        predict_with_generate: Give generated tokens to `compute_metrics` and `predict`, not logits. Default: false.
        generation_max_length: Maximum number of tokens. Default: that of the model's generation configuration.
        generation_num_beams: Number of beams. Default: that of the model's generation configuration.
        generation_config: The model's generation configuration: a GenerationConfig, or its file, folder or hub name.

    Raises:
        UsageError: As `TrainingArguments`.
    """

    sortish_sampler: bool = False
    predict_with_generate: bool = False
    generation_max_length: int | None = None
    generation_num_beams: int | None = None
    generation_config: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sortish_sampler:
            raise UsageError("sortish_sampler: is not supported; override get_train_dataloader")
        if self.predict_with_generate and self.full_sharding is not None:
            raise UsageError("predict_with_generate and fsdp: ranks generate on their own; use zero_1")
        for name in ("generation_max_length", "generation_num_beams"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name}: should be at least 1, and is {value}")
