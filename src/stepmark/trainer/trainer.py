"""The Trainer: transformers' names and calling conventions over Stepmark's public parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import (
    EvalLoopOutput,
    EvalPrediction,
    PredictionOutput,
    TrainerMemoryTracker,
    TrainOutput,
)

from stepmark.config.optimizers import MUON
from stepmark.config.training_fields import TrainingFields, set_log_level
from stepmark.config.unknown_fields import explains_keywords
from stepmark.data.loader.loader import DataLoader
from stepmark.data.loader.stream_loader import check_readable_again, is_stream
from stepmark.errors import DataError, UsageError
from stepmark.evaluation.evaluate import named_sets
from stepmark.evaluation.evaluator import Evaluator
from stepmark.evaluation.metrics import check_by_batch
from stepmark.evaluation.run_options import RunOptions, function_name
from stepmark.filesystem.files import make_folder, replace_file
from stepmark.filesystem.local_paths import local_path
from stepmark.launch.restarts import check_restarts
from stepmark.liveness.hang_detector import HangDetector
from stepmark.parallel.full_sharding import has_full_sharding
from stepmark.parallel.pipeline.staged_model import staged
from stepmark.parallel.tensor.vocabulary import return_logits
from stepmark.runtime.context import Context, start
from stepmark.runtime.device import runtime_for
from stepmark.runtime.module_placement import place_module
from stepmark.runtime.xla_environment import extracting_graphs
from stepmark.trainer.callbacks import RunCallbacks
from stepmark.trainer.compat.accelerator import Accelerator
from stepmark.trainer.compat.given_loader import GivenLoader
from stepmark.trainer.compat.overrides import (
    NEED_COMPLETE_MODEL,
    OverriddenLoss,
    Replaceable,
    call_sampler,
    check_assignment,
    check_overrides,
    check_pipeline,
    overrides,
    own_methods,
    sampler_of,
)
from stepmark.trainer.compat.transformers_arguments import check_kinds, converted
from stepmark.trainer.components import TrainingComponents, count_steps, make_checkpointer, make_step, retention
from stepmark.trainer.evaluation import EvaluationProgress, TrainerEvaluation, logged_evaluation
from stepmark.trainer.interruption.peer_watch import HangDetectors
from stepmark.trainer.loaders import LoaderFactory, default_collator, model_columns
from stepmark.trainer.resume import keep_logical_ranks
from stepmark.trainer.run import Run
from stepmark.trainer.run_folder.adapters import Adapter
from stepmark.trainer.run_folder.hub_uploads import HubUploads, check_hub, write_model_card
from stepmark.trainer.run_folder.memory_snapshots import MemorySnapshots
from stepmark.trainer.run_folder.model_export import SavedModel, own_storages, saved_processing
from stepmark.trainer.run_folder.run_identity import identity
from stepmark.trainer.run_folder.run_log import TRAINER_STATE
from stepmark.trainer.run_folder.run_mirror import RunMirror
from stepmark.trainer.run_hooks import RunHooks
from stepmark.trainer.run_model import align_special_tokens, check_packed, make_again, model_of, prepare_model
from stepmark.trainer.run_optimizer import RunOptimizer
from stepmark.trainer.telemetry.progress import metric_lines
from stepmark.trainer.training_arguments import TrainingArguments
from stepmark.trainer.training_loop import TrainingLoop
from stepmark.training.compiled_layers import compile_layers
from stepmark.training.learning_rate_schedule import build_schedule, warmup_length
from stepmark.training.micro_batches import autocast, autocast_dtype
from stepmark.training.model_labels import label_names, returns_loss
from stepmark.training.model_options import attention_of
from stepmark.training.model_wrappers import without_wrapper
from stepmark.training.one_graph_per_step.deferred_reads import read_numbers
from stepmark.training.optimizer import check_step, optimizer_class
from stepmark.training.weighted_loss import MicroBatchLoss


@explains_keywords
class Trainer:
    """Trains, evaluates and saves a model on one rank or many, on any device; every rank makes the same calls.

    A subclass may override `compute_loss`, `training_step`, `get_train_dataloader`, `get_eval_dataloader`,
    `create_optimizer`, `create_scheduler`, `create_optimizer_and_scheduler`, `prediction_step`, `evaluation_loop`,
    `evaluate`, `log`, `save_model`, `_save`, `_save_checkpoint` and `_set_signature_columns_if_needed`, which are
    called as transformers' Trainer calls them. A class that overrides another hook of transformers is an error.

    Args:
        model: A module whose forward returns the mean loss of a batch, such as transformers' models. One that sums its
            losses must divide by a `num_items_in_batch` that its forward takes. It is moved to the device and sharded
            as `args` says, unless `load_for_parallelism` or `parallelize` has done so; its Parameters stay the same
            objects. A DistributedDataParallel wrapper is removed.
        args: The training arguments. transformers' own are converted; fields that Stepmark lacks must have their
            default values. Default: `TrainingArguments()`.
        data_collator: Makes a batch from a list of samples; a `PadTo` states the lengths to pad to. Default: as in
            transformers: a tokenizer or feature extractor passed as `processing_class` pads, otherwise samples are
            stacked. Samples of Stepmark's own datasets are padded as these need.
        train_dataset: Map-style or iterable; needed by `train`. An iterable one without a length needs `max_steps`; the
            ranks take its batches in turn, and a resumed run skips the samples that were trained.
        eval_dataset: The same for `evaluate`, or several by name.
        processing_class: The tokenizer, which is saved with the model. Default: `data_collator.tokenizer`.
        model_init: Makes the model, instead of `model`, from `seed`: now, and again for every further `train()`.
        compute_loss_func: `(outputs, labels, num_items_in_batch)` to a loss, instead of the model's own: a mean over
            the targets of the micro-batch, or their sum divided by `num_items_in_batch`, the number of targets in the
            micro-batch (in transformers: in the step). Both give the mean over the step's targets, for any
            accumulation and number of ranks.
        compute_metrics: Maps an `EvalPrediction` to metrics by name, which are added to those of evaluations.
        callbacks: transformers' `TrainerCallback` objects or classes. `on_save` is called when the checkpoint is
            complete on disk, also with `async_save`; a callback may read it and add files.
        optimizers: (optimizer, schedule); each that is None is made from `args`.
        preprocess_logits_for_metrics: Maps `(logits, labels)` to what `compute_metrics` gets as predictions.
        optimizer_cls_and_kwargs: The class of an optimizer and its arguments, in place of `optim`. Weight decay is that
            of these arguments, where the model has it by default.
        run: An opened run to use. Default: `args` say which to open.

    Attributes:
        loss_averages_over: What the loss is a mean over: `targets` (batches are weighted by their labels that are not
            -100), or `samples` although batches have labels that could be counted. Set it in a subclass with such a
            `compute_loss`. Default: that of `compute_loss_func` or of the model, else `targets`.
        compute_loss_func: The argument of this name, which may be set.
        model_accepts_loss_kwargs: Ignored, since losses are always means. Some scripts set it.
        can_return_loss: Whether an overridden `compute_loss` needs no labels, so that evaluations have a loss without
            `label_names`.
        accelerator: The ranks and the device under accelerate's names.
        optimizer: The run's `torch.optim` optimizer; None before `create_optimizer`.
        lr_scheduler: The run's schedule; None before `create_scheduler`.
        checkpoint_files: Functions that rank 0 calls with the folder of a new checkpoint. What they write there becomes
            part of the checkpoint.

    Raises:
        UsageError: The arguments do not fit together, or not the model.
        DeviceError: There is no such device.
    """

    loss_averages_over: str | None = None
    causal_shift: bool | None = None
    model_accepts_loss_kwargs = False
    loss_is_scaled_for_ga: bool | None = None
    current_gradient_accumulation_steps = 1  # by which a loss is divided that is not a mean of its own
    can_return_loss = False
    is_deepspeed_enabled = False
    is_fsdp_enabled = False
    is_model_parallel = False
    place_model_on_device = True
    arguments_class: type[TrainingArguments] | None = None  # of a library's trainer
    _signature_columns: list[str] | None = None
    _trained = False  # by a call of `train`
    _eval_options: Mapping[str, Any] = {}  # of evaluations in training
    _hosts_ranks = True  # whether a process may have several logical ranks
    _in_save_model = False  # which calls `_save`
    _loss_shifts_labels = property(lambda self: self._loss.causal_shift)
    _train_batch_size = property(lambda self: self.args.train_batch_size)  # read by programs, also after resuming

    loss = Replaceable(lambda trainer: trainer._loss, "Calls the model and weights its loss, for every micro-batch.")
    evaluator = Replaceable(
        lambda trainer: trainer._evaluator, "Evaluates with the loss and the functions that the Trainer has now."
    )

    def __init_subclass__(cls, **options: Any) -> None:
        """Raises UsageError where the class overrides a method that would never be called."""
        super().__init_subclass__(**options)
        check_overrides(cls, _OWN_METHODS)

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingFields | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        preprocess_logits_for_metrics: Callable[..., torch.Tensor] | None = None,
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        *,
        run: Run | None = None,
    ) -> None:
        check_overrides(type(self), _OWN_METHODS)
        self.args: TrainingArguments = converted(args, self.arguments_class)
        self._memory_tracker = TrainerMemoryTracker(self.args.skip_memory_metrics)
        self._memory_tracker.start()
        set_log_level(self.args)
        check_restarts(self.args.max_restarts)
        model = without_wrapper(model_of(model, model_init, self.args.seed))
        self.model_init = model_init
        check_kinds(data_collator=data_collator, train_dataset=train_dataset, eval_dataset=eval_dataset)
        check_kinds(callbacks=callbacks, optimizers=optimizers)
        check_packed(model, train_dataset, eval_dataset)
        self._run = run or vars(self).get("_run") or Run.open(self.args)
        self.context: Context = self._run.context
        self.mesh = prepare_model(model, self.args, self.context)
        self.model = model
        self._saved = SavedModel(model, self.mesh, Path(self.args.output_dir), self.args.mirror_to)
        for name in filter(self._overridden, NEED_COMPLETE_MODEL):
            check_pipeline(name, self.mesh.pipeline.size)
        if self.args.batch_eval_metrics and compute_metrics is not None:
            check_by_batch(compute_metrics)
        self._default_collator = default_collator(processing_class)
        self.data_collator = self._default_collator if data_collator is None else data_collator
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.processing_class = processing_class
        self.compute_metrics = compute_metrics
        self.optimizer, self.lr_scheduler = optimizers
        if self.optimizer is not None:
            check_step(type(self.optimizer))
        self._optimizers = RunOptimizer(optimizer_cls_and_kwargs)
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.compute_loss_func = compute_loss_func
        self._hooks = RunHooks(self)
        self._set_loss()
        self.checkpoint_files: list[Callable[[Path], None]] = []
        self._callbacks = RunCallbacks(
            self.args,
            callbacks or (),
            model,
            processing_class,
            self._run.log,
            leads_node=self.context.world.local_rank == 0,
            log=lambda logs: self.log(logs),
        )
        self._hub = HubUploads(self.context.host)
        if self.args.push_to_hub and not extracting_graphs():
            divided = 1 if self.args.full_sharding is None else self.mesh.data_parallel.size
            check_hub(self.args, divided * math.prod(self.mesh.sharing.values()))
            self.init_hf_repo()
            if self.args.hub_strategy != "end":
                self.add_callback(self._hub)
        self._watches = HangDetectors(self.mesh, self._callbacks)
        self._callbacks.event("on_init_end")
        self._memory_tracker.stop_and_update_metrics()

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute, which the next call of `train` or `evaluate` uses, as in transformers.

        Raises:
            UsageError: Setting it would have no effect: another model, or a hook that is never called; or a pipeline
                rules it out.
        """
        name = "causal_shift" if name == "_loss_shifts_labels" else name  # in transformers
        check_assignment(self, name, value)
        if name in NEED_COMPLETE_MODEL:
            check_pipeline(name, self.mesh.pipeline.size)
        if name in ("train_dataset", "eval_dataset"):
            check_packed(self.model, value, may_call=False)
        super().__setattr__(name, value)
        if name == "compute_loss" and "_loss" in vars(self):
            self._find_override()
        elif name in ("compute_loss_func", "loss_averages_over", "causal_shift") and "_loss" in vars(self):
            self._set_loss()

    def _overridden(self, name: str) -> bool:
        """Whether a subclass, or an attribute that was set, replaces a method."""
        return overrides(self, _OWN_METHODS, name)

    def _move_model_to_device(self, model: nn.Module, device: torch.device | str) -> None:
        """Moves a model of a script's own, such as a teacher, to a device, where tied weights stay tied."""
        place_module(model, runtime_for(torch.device(device)))

    # What callbacks see

    @property
    def state(self) -> TrainerState:
        """The progress of training, as transformers' callbacks see it."""
        return self._callbacks.state

    @state.setter
    def state(self, state: TrainerState) -> None:
        self._callbacks.state = state

    @property
    def is_in_train(self) -> bool:
        """Whether `train` is running."""
        return self._callbacks.training

    @property
    def control(self) -> TrainerControl:
        """The flags by which callbacks ask for logs, evaluations, saves and an early stop."""
        return self._callbacks.control

    @control.setter
    def control(self, control: TrainerControl) -> None:
        self._callbacks.control = control

    @property
    def callback_handler(self) -> Any:
        """transformers' CallbackHandler with all callbacks."""
        return self._callbacks.handler

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Adds a callback, an object or a class that is called without arguments."""
        self._callbacks.add(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Removes a callback, or the first one of a class, and returns it; None where there is none."""
        return self._callbacks.handler.pop_callback(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Removes a callback, or the first one of a class."""
        self._callbacks.handler.remove_callback(callback)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds values to the history, to metrics.jsonl and to the callbacks' logs, with the current step and epoch.

        Everything that a run logs passes through here. A subclass may override it, for example to add values.

        Args:
            logs: Plain numbers by name.
            start_time: Ignored; part of transformers' signature.
        """
        self._callbacks.record(read_numbers(logs))

    # Parts

    def is_world_process_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.context.host.rank == 0

    def is_local_process_zero(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.context.world.local_rank == 0

    def get_train_dataloader(self) -> Any:
        """Returns the batches of the training data. A subclass may return any iterable of batches.

        Its order is kept. The ranks take its batches in turn, unless its sampler already shards the data, such as
        DistributedSampler. Its position is saved if it has `state_dict` and `load_state_dict`; otherwise a resumed run
        skips the batches that were trained.

        Returns:
            An iterable with a length and a `dataset`, of this rank's batches on the host.

        Raises:
            UsageError: There is no training data.
        """
        if self._overridden("_get_train_sampler") and not is_stream(self.train_dataset):
            return self._loaders.sampled_batches(self.train_dataset, partial(call_sampler, self))
        return self._loaders.train_batches(self.train_dataset)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        """Returns a sampler of the training data. A subclass may override it to set the order of samples; a resumed run
        then skips the batches that were trained."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        return sampler_of(dataset, self.args.train_sampling_strategy)

    def get_eval_dataloader(self, eval_dataset: str | Dataset | None = None) -> Any:
        """Returns the batches of evaluation data, in order. A subclass may return any iterable of batches.

        Args:
            eval_dataset: The data, or the name of one of the Trainer's sets; default: the Trainer's own.

        Returns:
            An iterable as that of `get_train_dataloader`.

        Raises:
            UsageError: There is no evaluation data.
        """
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            sets = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else {}
            if dataset not in sets:
                raise UsageError(f"eval_dataset: there is no set {dataset!r}; the Trainer's are {list(sets)}")
            dataset = sets[dataset]
        return self._loaders.eval_batches(dataset)

    def get_test_dataloader(self, test_dataset: Dataset) -> Any:
        """Returns the batches of the data of `predict`, as `get_eval_dataloader` does."""
        return self._loaders.eval_batches(test_dataset)

    @cached_property
    def accelerator(self) -> Any:
        """What accelerate's Accelerator is to transformers' Trainer: ranks, device, gathering. It may be set."""
        return Accelerator(self)

    def _set_signature_columns_if_needed(self) -> None:
        """Sets `_signature_columns`: what `remove_unused_columns` keeps of samples. A subclass may set others."""
        if self._signature_columns is None:
            columns = model_columns(self.model, self._loss.labels)
            self._signature_columns = None if columns is None else sorted(columns)

    @property
    def _loaders(self) -> LoaderFactory:
        own = None if self.data_collator is self._default_collator else self.data_collator
        theirs = str(getattr(self.prediction_step, "__module__", "")).partition(".")[0] != "stepmark"
        own_loss = self._loss.override is not None or theirs
        if self._overridden("_set_signature_columns_if_needed"):
            self._set_signature_columns_if_needed()
        names = None if self._signature_columns is None else frozenset(self._signature_columns)
        return LoaderFactory(self.args, self.model, self.mesh, self._loss, own, self.processing_class, own_loss, names)

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Sets `optimizer` and `lr_scheduler`, those that are not set yet.

        Args:
            num_training_steps: Steps of the run.
        """
        optimizer = self.create_optimizer()
        self.optimizer = optimizer if self.optimizer is None else self.optimizer
        schedule = self.create_scheduler(num_training_steps)
        self.lr_scheduler = schedule if self.lr_scheduler is None else self.lr_scheduler

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Sets `optimizer` to the one that the arguments name, unless it is set, and returns it.

        Args:
            model: The model to optimize; default: the Trainer's.
        """
        if self.optimizer is None:
            self.optimizer = self._optimizers.create(model or self.model, self.args, self.mesh)
        return self.optimizer

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """Returns the class of the optimizer that training arguments name, and its arguments but for the weight decay,
        for a `create_optimizer` of one's own with other groups.

        Args:
            args: The training arguments.
            model: Ignored; part of transformers' signature.

        Raises:
            UsageError: It is muon, whose groups only the Trainer makes; or the name is unknown.
        """
        own = converted(args)
        if own.optim == MUON:
            raise UsageError("optim: muon needs the groups that create_optimizer of the Trainer makes; call that")
        betas = own.adam_beta1, own.adam_beta2
        runtime = start(own.device_name, own.join_timeout).runtime
        return optimizer_class(
            own.optim, runtime, own.learning_rate, betas, own.adam_epsilon, own.parsed_options("optim_args")
        )

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Sets `lr_scheduler` to the one that the arguments name, unless it is set, and returns it.

        Args:
            num_training_steps: Steps of the run.
            optimizer: Whose learning rates it sets; default: `optimizer` of the Trainer.
        """
        optimizer = optimizer or self.optimizer
        if self.lr_scheduler is None:
            if optimizer is None:
                raise UsageError("create_scheduler: there is no optimizer yet; call create_optimizer first")
            args, steps = self.args, num_training_steps
            warmup = warmup_length(args.warmup_steps, args.warmup_ratio, steps)
            self.lr_scheduler = build_schedule(
                args.lr_scheduler_type, optimizer, steps, warmup, args.parsed_options("lr_scheduler_kwargs")
            )
        return self.lr_scheduler

    def identity(self) -> dict[str, Any]:
        """Returns what a resumed run must have in common with the one that saved, as plain values."""
        own = identity(self.model, self.processing_class, self.train_dataset, self.args.seed, self._loaders.data_seed)
        saved = self._saved.module
        return own | (saved.identity(self.mesh) if isinstance(saved, Adapter) else {})

    # The loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | float | None = None,
    ) -> Any:
        """Computes the loss of one batch: the model's own, the smoothed one, or that of `compute_loss_func`.

        A subclass may override it, and return a mean over the batch or a sum divided by `num_items_in_batch`. Batches
        are weighted by their targets, so that both give the mean over a step on all ranks.

        Args:
            model: The model.
            inputs: A batch on the device.
            return_outputs: Also return the model's outputs. Default: False.
            num_items_in_batch: The number of targets, a 0-dim tensor, by which a summed loss is divided. Default: that
                of the batch.

        Returns:
            The loss, a 0-dim tensor, or a tuple of it and the outputs.
        """
        loss, outputs = self._loss.mean(model, inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Runs the forward and backward pass of a micro-batch. A subclass may override it to do something around them,
        and has to call this method, once for each micro-batch.

        Args:
            model: The model.
            inputs: A micro-batch on the device.
            num_items_in_batch: Its number of targets, a 0-dim tensor.

        Returns:
            The micro-batch's share of the step's loss, a 0-dim tensor.

        Raises:
            UsageError: No micro-batch of `train` waits for it.
        """
        return self._hooks.run_passes(inputs)

    def compute_loss_context_manager(self) -> torch.autocast:
        """Returns the context in which models are called: autocast, as `bf16` and `fp16` say."""
        dtype = autocast_dtype(bf16=self.args.bf16, fp16=self.args.fp16)
        return autocast(self.context.runtime, dtype, sharded=has_full_sharding(self.model))

    def _prepare_inputs(self, inputs: Any) -> Any:
        """The batch on the device, for a subclass that calls it; batches that the Trainer passes are there already."""
        return self.context.runtime.place(inputs)

    @property
    def label_names(self) -> list[str]:
        """The names of the inputs that are labels; they may be set."""
        return list(self._loss.labels.names)

    @label_names.setter
    def label_names(self, names: Sequence[str]) -> None:
        self.args.label_names = list(names)
        self._set_loss()

    def _set_loss(self) -> None:
        loss = MicroBatchLoss(
            self.model,
            compute_loss_func=self.compute_loss_func,
            label_smoothing=self.args.label_smoothing_factor,
            label_names=self.args.label_names,
            causal_shift=self.args.causal_shift,
            lazy=self.context.runtime.lazy,
            declared_by=self,
        )
        self._loss: MicroBatchLoss = self.__dict__.get("_loss", loss)  # the same one for a step in progress
        self._loss.__dict__.update({**loss.__dict__, "override": self._loss.override})

    def _find_override(self) -> None:
        """Looks for a `compute_loss` of the user's, which a script may also give the class later."""
        self._loss.override = OverriddenLoss(self) if self._overridden("compute_loss") else None
        return_logits(self.model, wanted=self._loss.override is not None)

    # Training

    def train(
        self,
        resume_from_checkpoint: bool | str | None = None,
        *,
        ignore_keys_for_eval: list[str] | None = None,
        save_model: bool = False,
    ) -> TrainOutput:
        """Trains to the end of the run. Collective.

        Args:
            resume_from_checkpoint: A checkpoint to resume from, or True for the newest complete one in `output_dir` (or
                a start from step 0 if there is none). Default: that of the arguments.
            ignore_keys_for_eval: The `ignore_keys` of its evaluations; see `evaluate`.
            save_model: Also write the final model, and with an `eval_strategy` its evaluation, to `output_dir` before
                the run's status becomes `done`.

        Returns:
            The number of steps, the mean training loss over all tokens of the run, and the values of
            train_results.json. Resuming a finished run returns its results.

        Raises:
            CheckpointError: The checkpoint cannot be resumed from, or a save failed.
            UsageError: There is no training data, or `output_dir` cannot be used.
            StepmarkError: The final model cannot be written, for example because the disk is full.
            RunInterrupted: A signal stopped the run, which can be resumed (a SystemExit with code 75).
        """
        self._memory_tracker.start()
        resume = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        self._eval_options = {} if ignore_keys_for_eval is None else {"ignore_keys": ignore_keys_for_eval}
        with self._watches.begun() as watch:
            output = self._train(watch, resume, save_model)
        self._memory_tracker.stop_and_update_metrics(output.metrics)
        return output

    def _train(self, watch: HangDetector, resume: bool | str | None, save_model: bool) -> TrainOutput:
        folder, run = Path(self.args.output_dir), self._run
        run.begin_training(folder)
        self._callbacks.reset()
        self._find_override()
        if self.model_init is not None and self._trained:
            make_again(self.model, self.model_init, self.args.seed, self.mesh)
        self._trained = True
        align_special_tokens(self.model, self.processing_class)
        make, keep = partial(make_checkpointer, args=self.args, mesh=self.mesh), retention(self.args)
        with (
            make(folder, keep=keep) as checkpointer,
            MemorySnapshots(self.args, checkpointer, self.context.host, make) as snapshots,
            RunMirror(self.args, keep, checkpointer, self.context, run.log) as mirror,
        ):
            resume = mirror.open(resume)
            hosts, snapshot = self._hosts_ranks and self.args.hosts_ranks, snapshots.newest()
            keep_logical_ranks(self.mesh, checkpointer, resume, snapshot, hosts=hosts)
            parts = self.make_parts()
            loop = TrainingLoop(parts, self._callbacks, checkpointer, self._hooks, mirror, snapshots)
            evaluates = self.args.eval_strategy != "no"
            if evaluates:
                self._eval_sets()
                self.evaluation.prompt_sampler()  # which says now what it cannot continue
            loop.take_folder(resumes=bool(resume))
            own = parts.loader  # callbacks get a second loader, whose position is not that of the run
            self._callbacks.show(parts, own.given if isinstance(own, GivenLoader) else own.again())
            with loop.recording_end():
                with loop.stopping_at_signals(), watch:
                    theirs = any(map(self._overridden, ("evaluate", "evaluation_loop", "get_eval_dataloader")))
                    if evaluates and not extracting_graphs() and not theirs:
                        self.evaluation.foretell_memory(self._eval_sets().values(), self.get_eval_dataloader)
                    metrics = loop.train(loop.restore(resume))
                    self._hub.wait()
                    run.write_results("train", metrics, [self.train_dataset] if save_model else [])
                    Trainer.save_state(self)
                if save_model:
                    self.save_model()
                    if evaluates:
                        run.write_results("eval", self.final_evaluation(), self._eval_sets().values())
                run.finish(self.state.global_step, loop.stop_reason)
            mirror.complete()
            return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    def make_parts(self) -> TrainingComponents:
        """The parts of a training: loader, optimizer, schedule, step."""
        loader = self._loaders.steps_of(self.get_train_dataloader(), self.args.gradient_accumulation_steps)
        if self.args.torch_compile:
            static = isinstance(loader, DataLoader) and not loader.shapes_vary
            compile_layers(self.model, self.args, static=static)
        total_steps = count_steps(self.args, loader)
        self.optimizer, self.lr_scheduler = self._optimizers.without_made(self.optimizer, self.lr_scheduler)
        stages = staged(self.model)
        with nullcontext() if stages is None else stages.complete():
            self.create_optimizer_and_scheduler(total_steps)
        optimizer = self._optimizers.of_step(self.model, self.args, self.mesh, self.optimizer, self.lr_scheduler)
        own, dataset = self.identity(), self.train_dataset if self.eval_dataset is None else self.eval_dataset
        if any(each != own["data"] for each in self.context.host.all_gather(own["data"])):
            raise UsageError(
                "train_dataset: is another one on some ranks; give all of them the whole, as each takes its part, and "
                "shuffle it with a seed"
            )
        own_loss = self.compute_loss if self._overridden("compute_loss") else self.compute_loss_func
        around = self._hooks.around_passes if self._overridden("training_step") else None
        return TrainingComponents(
            args=self.args,
            context=self.context,
            mesh=self.mesh,
            model=self.model,
            saved=self._saved.module,
            loader=loader,
            optimizer=optimizer,
            schedule=self.lr_scheduler,
            step=make_step(self.model, optimizer, self._loss, self.mesh, self.args, around),
            total_steps=total_steps,
            identity=own,
            data=getattr(self.train_dataset, "description", None),
            evaluation=RunOptions.of_training(
                self.args,
                block_size=getattr(dataset, "block_size", None),
                metrics=function_name(self.compute_metrics),
                loss=function_name(own_loss),
                columns=getattr(dataset, "sample_columns", None),
                attn_implementation=attention_of(self.model),
            ),
        )

    # Evaluation

    @property
    def _evaluator(self) -> Evaluator:
        self._find_override()
        named = label_names(self.model) if self.args.label_names is None else self.args.label_names
        return Evaluator(
            self.model,
            self._loss,
            self.mesh,
            autocast_dtype(bf16=self.args.bf16, fp16=self.args.fp16),
            preprocess_logits=self.preprocess_logits_for_metrics,
            prediction_step=self._hooks.predict if self._overridden("prediction_step") else None,
            needs_no_labels=not named and (self.can_return_loss or returns_loss(self.model)),
        )

    @property
    def evaluation(self) -> TrainerEvaluation:
        """Evaluates batches with what the Trainer has now, as its arguments say."""
        given = self._evaluator, self.args, self._callbacks, self._loaders, self.compute_metrics
        return TrainerEvaluation(*given, self._hooks.evaluation)

    def evaluate(
        self,
        eval_dataset: str | Dataset | Mapping[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Computes loss and metrics over exactly the samples of a dataset. Collective.

        A subclass may override it; training evaluates through it too. It is called once for each of several datasets.

        Args:
            eval_dataset: The data, or several datasets by name, or the name of one of the Trainer's sets; default: the
                Trainer's own.
            ignore_keys: Names of outputs that are not predictions. Default: those that the model's config lists.
            metric_key_prefix: What the metrics' names begin with; the names of several datasets are appended to it.

        Returns:
            The metrics by name; runtimes are in seconds.

        Raises:
            UsageError: There is no evaluation data.
            DataError: A dataset is empty.
        """
        self._memory_tracker.start()
        if not isinstance(eval_dataset, str):
            self._eval_sets(eval_dataset)  # raises where there is no data
        own = eval_dataset is None
        data = self.eval_dataset if own else eval_dataset
        if isinstance(data, Mapping):
            metrics: dict[str, float] = {}
            for name, dataset in data.items():
                metrics |= self.evaluate(
                    eval_dataset=name if own else dataset,
                    ignore_keys=ignore_keys,
                    metric_key_prefix=f"{metric_key_prefix}_{name}",
                )
        else:
            given: Any = eval_dataset
            batches = partial(self.get_eval_dataloader, given)

            def overridden_loop() -> Any:
                loss_only = True if self.compute_metrics is None else None
                return self.evaluation_loop(
                    batches(), "Evaluation", loss_only, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix
                ).metrics

            loop = overridden_loop if self._overridden("evaluation_loop") else None
            metrics = self.evaluation.of_set(batches, metric_key_prefix, ignore_keys, loop)
        self._memory_tracker.stop_and_update_metrics(metrics)
        if own and metric_key_prefix == "eval":
            self._callbacks.last_evaluation = (self._callbacks.model_position()[0], metrics)
        return metrics

    def _eval_sets(self, given: Any = None) -> dict[str, Any]:
        """The sets to evaluate, by the prefix of their metrics."""
        dataset = self.eval_dataset if given is None else given
        if dataset is None and self._overridden("get_eval_dataloader"):
            return {"eval": None}
        if dataset is None:
            raise UsageError("eval_dataset: evaluation needs one")
        sets = named_sets(dataset, "eval", "eval_dataset")
        for each in sets.values() if given is None else ():
            check_readable_again("eval_dataset", each)
        return sets

    def final_evaluation(self) -> dict[str, float]:
        """Returns the metrics of the final model, which is evaluated unless it was already. Collective.

        With `load_best_model_at_end` it is the best model.
        """
        step, _ = self._callbacks.model_position()
        last = self._callbacks.last_evaluation
        if last is not None and last[0] == step:
            return last[1]
        with self._hooks.evaluating(EvaluationProgress()):
            logged = logged_evaluation(self.state.log_history, step, self._eval_sets())
            return logged or self.evaluate(**self._eval_options)

    def predict(
        self, test_dataset: Dataset, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Computes predictions, labels and metrics over exactly the samples of a dataset. Collective.

        Args:
            test_dataset: The data.
            ignore_keys: Names of outputs that are not predictions. Default: those that the model's config lists.
            metric_key_prefix: What the metrics' names begin with.

        Returns:
            Numpy arrays of all samples in order, and the metrics by name.

        Raises:
            DataError: The dataset is empty.
        """
        if hasattr(test_dataset, "__len__") and not len(test_dataset):
            raise DataError("test_dataset: it is empty; pass one with samples")
        self._memory_tracker.start()
        batches = self.get_test_dataloader(test_dataset)
        found = self.evaluation_loop(
            batches, "Prediction", ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix
        )
        self._memory_tracker.stop_and_update_metrics(found.metrics)
        self._callbacks.event("on_predict", found.metrics)
        return PredictionOutput(found.predictions, found.label_ids, found.metrics)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Evaluates one batch. A subclass may override it.

        Args:
            model: The model.
            inputs: A batch on the device.
            prediction_loss_only: Return no predictions and labels.
            ignore_keys: Names of outputs that are not predictions. Default: those that the model's config lists.

        Returns:
            The batch's mean loss, a 0-dim tensor (None without labels), predictions and labels: tensors, or tuples.
        """
        loss, predictions, labels = replace(self._evaluator, model=model).predict_batch(inputs, ignore_keys)
        return (loss, None, None) if prediction_loss_only else (loss, predictions, labels)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str = "",
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluates batches and returns predictions and metrics, for subclasses whose `evaluate` or `predict` works on
        the predictions. A subclass may call it, or override it to add metrics; then a set without batches has no loss.
        Collective.

        Args:
            dataloader: What `get_eval_dataloader` or `get_test_dataloader` returned, or any batches.
            description: Ignored; part of transformers' signature.
            prediction_loss_only: Compute only the loss. Default: the argument of this name.
            ignore_keys: Names of outputs that are not predictions. Default: those that the model's config lists.
            metric_key_prefix: What the metrics' names begin with.

        Returns:
            Numpy arrays of all samples in order (None with `prediction_loss_only`), the metrics, those of
            `compute_metrics` included, and the number of samples.
        """
        if self._overridden("evaluation_loop") and hasattr(dataloader, "__len__") and not len(dataloader):
            nothing: Any = None
            return EvalLoopOutput(nothing, nothing, {f"{metric_key_prefix}_runtime": 0.0}, 0)
        evaluation = self.evaluation
        found = evaluation.run(dataloader, gather=True, loss_only=prediction_loss_only, ignore_keys=ignore_keys)
        metrics = evaluation.metrics(found, metric_key_prefix)
        return EvalLoopOutput(found.rows.predictions, found.rows.labels, metrics, found.samples)

    # Saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the model as a Hugging Face folder: weights, config and tokenizer. Collective.

        If a subclass overrides it, it is also called for every checkpoint, to which the files that it writes are added.
        Called from there, this method writes no weights: the checkpoint has them.

        Args:
            output_dir: The folder; default: the run's.
            _internal_call: Whether the call is for a checkpoint, as in transformers.

        Raises:
            StepmarkError: The folder cannot be written to; on all ranks.
        """
        folder = local_path(output_dir or self.args.output_dir, "output_dir").absolute()
        self._saved.write(folder, self._saved_processing, self.args.save_timeout)
        if self._overridden("_save") and not extracting_graphs():
            if self.context.host.rank == 0:
                with own_storages(self.model):
                    self._in_save_model = True
                    try:
                        self._save(str(folder))
                    finally:
                        self._in_save_model = False
            self.context.host.barrier()

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Writes the model as `save_model` does, on rank 0 and without the other ranks, for scripts that call it.

        A subclass may override it to write more files, which become part of checkpoints: `save_model` calls it on rank
        0 when the model is written, and this method does nothing then.

        Args:
            output_dir: The folder; default: the run's.
            state_dict: The model's state dict, whose values are written. Default: those of the model.

        Raises:
            UsageError: Ranks hold the model together, or the state dict lacks something.
            StepmarkError: The folder cannot be written to.
        """
        if self.is_world_process_zero() and not self._in_save_model:
            folder = local_path(output_dir or self.args.output_dir, "output_dir").absolute()
            self._saved.write(folder, self._saved_processing, self.args.save_timeout, alone=True, state=state_dict)

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        """Saves the run, as training does. A subclass may override it to do something before or after: the checkpoint
        is complete on disk when this method returns. If the subclass does not call it, the checkpoint is written when
        the subclass is done, and has what that wrote to its folder. Collective.

        Args:
            model: The model.
            trial: Ignored; part of transformers' signature.

        Raises:
            UsageError: Training is not about to save.
        """
        self._hooks.save_now()

    def _get_output_dir(self, trial: Any = None) -> str:
        """The run's folder, for a subclass that asks for that of checkpoints."""
        return self.args.output_dir

    def run_state(self) -> dict[str, Any]:
        """What a subclass adds to the state of the run that checkpoints hold, such as running sums: plain values. It is
        asked after a step, on all ranks; that of rank 0 is saved."""
        return {}

    def load_run_state(self, state: dict[str, Any]) -> None:
        """Gets what `run_state` has returned, on all ranks, when a run is resumed."""

    def _complete_run_state(self) -> dict[str, Any]:
        """`run_state`, and what the base of a library's trainer adds."""
        return self.run_state()

    def _load_complete_run_state(self, state: dict[str, Any]) -> None:
        self.load_run_state(state)

    @property
    def _saved_processing(self) -> Any:
        return saved_processing(self.processing_class, self.data_collator)

    # The Hugging Face hub

    @property
    def hub_model_id(self) -> str | None:
        """The repository's complete name; None before the first upload, and on other ranks than 0."""
        return self._hub.name

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Creates the repository of the arguments, or finds that it exists. Collective.

        Args:
            token: A token with write permission; default: `hub_token`, or the one of `hf auth login`.
            private: Whether a new repository is private; default: `hub_private_repo`.

        Raises:
            StepmarkError: It cannot be created; on all ranks.
        """
        self._hub.create(self.args, token, private)

    def create_model_card(self, **details: Any) -> None:
        """Writes README.md, a draft of a model card, to the run's folder, on rank 0; not while graphs are extracted.

        Args:
            **details: Those of transformers' method: `language`, `license`, `tags`, `model_name`, `finetuned_from`,
                `tasks`, `dataset_tags`, `dataset`, `dataset_args`.
        """
        if self.context.host.rank == 0 and not extracting_graphs():
            write_model_card(self, **details)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **details: Any,
    ) -> Any:
        """Saves the model to the run's folder, with a model card, and uploads it. Collective.

        Args:
            commit_message: Of the commit.
            blocking: Return when the upload is complete. Default: True.
            token: A token with write permission; default: `hub_token`, or the one of `hf auth login`.
            revision: The branch; default: `hub_revision`, or the main one.
            private: Whether a new repository is private; default: `hub_private_repo`.
            **details: For `create_model_card`.

        Returns:
            huggingface_hub's CommitInfo, or a future of it where `blocking` is false; None on other ranks than 0, and
            where the process only extracts graphs (`NEURON_EXTRACT_GRAPHS_ONLY`), which uploads nothing.

        Raises:
            StepmarkError: The folder cannot be written to, or the upload fails.
        """
        if not self.context.host.broadcast(self._hub.name is not None):
            self.init_hf_repo(token, private)
        self.save_model()
        if self._hub.name is None or extracting_graphs():
            return None
        name = (self.args.hub_model_id or Path(self.args.output_dir).name).split("/")[-1]
        self.create_model_card(**{"model_name": name, **details})
        return self._hub.push(self.args, commit_message, blocking, revision)

    # What scripts ask and write

    @property
    def model_wrapped(self) -> nn.Module:
        """The model: nothing is wrapped around it."""
        return self.model

    @property
    def label_smoother(self) -> Any:
        """transformers' LabelSmoother, for a `compute_loss` that calls it; None without `label_smoothing_factor`."""
        from transformers.trainer_pt_utils import LabelSmoother

        return LabelSmoother(epsilon=self._loss.smoothing) if self._loss.smoothing else None

    def get_num_trainable_parameters(self) -> int:
        """The number of values in the parameters that are trained, of this rank's part of the model."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """The learning rate of each of the optimizer's parameter groups."""
        return [group["lr"] for group in self._groups()]

    def get_optimizer_group(self, param: str | Tensor | None = None) -> Any:
        """The parameter group that a parameter is in, or the parameters of every group.

        Args:
            param: A parameter, or its name. Default: none.

        Raises:
            UsageError: There is no such parameter in a group; `zero_1` has other tensors there.
        """
        groups = self._groups()
        if param is None:
            return [group["params"] for group in groups]
        wanted = dict(self.model.named_parameters()).get(param) if isinstance(param, str) else param
        for group in groups:
            if any(each is wanted for each in group["params"]):
                return group
        name = f"{param!r}" if isinstance(param, str) else "the given one"
        raise UsageError(f"get_optimizer_group: the optimizer has no parameter {name}")

    def _groups(self) -> list[dict[str, Any]]:
        if self.optimizer is None:
            raise UsageError("optimizer: there is none yet; call create_optimizer or train first")
        return self.optimizer.param_groups

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Prints metrics on rank 0.

        Args:
            split: The heading: `train`, `eval` or `predict` for example.
            metrics: The metrics by name.
        """
        if self.is_world_process_zero():
            print("\n".join(metric_lines(split, metrics)), flush=True)

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Writes metrics to `<split>_results.json` in the run's folder, on rank 0.

        Args:
            split: `train`, `eval` or `predict` for example.
            metrics: The metrics by name.
            combined: Also add them to all_results.json. Default: True.

        Raises:
            StepmarkError: The folder cannot be written to.
        """
        with self._run.writing():
            make_folder(Path(self.args.output_dir))
            self._run.log.results(split, dict(metrics), combined=combined)

    def save_state(self) -> None:
        """Writes trainer_state.json to the run's folder, on rank 0; training does so itself.

        Raises:
            StepmarkError: The folder cannot be written to.
        """
        if self._run.log.writes:
            with self._run.writing():
                replace_file(Path(self.args.output_dir) / TRAINER_STATE, self._callbacks.encode_state())


_OWN_METHODS = own_methods(Trainer)
