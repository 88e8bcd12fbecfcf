"""The Trainer: transformers' names and calling conventions over Stepmark's public parts."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Sampler
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import EvalPrediction, TrainerMemoryTracker

from stepmark.checkpoint import Checkpointer
from stepmark.config.old_names import explains_keywords
from stepmark.config.training_fields import TrainingFields, set_log_level
from stepmark.data.loader.collate import PadTo
from stepmark.data.loader.loader import DataLoader
from stepmark.errors import UsageError
from stepmark.evaluation.metrics import check_by_batch
from stepmark.evaluation.run_options import RunOptions, function_name
from stepmark.launch.restarts import check_restarts
from stepmark.liveness.rank_heartbeats import PeerWatch
from stepmark.parallel.optimizer.protocols import StepOptimizer
from stepmark.runtime.compile_cache import open_compile_cache, prepare_compile_cache
from stepmark.runtime.context import Context, start
from stepmark.runtime.xla_environment import extracting_graphs, warn_not_saved
from stepmark.trainer.callbacks import RunCallbacks
from stepmark.trainer.compat.custom_loss import call_compute_loss
from stepmark.trainer.compat.given_loader import GivenLoader
from stepmark.trainer.compat.given_samplers import call_sampler, sampler_of
from stepmark.trainer.compat.model_factory import model_of
from stepmark.trainer.compat.overrides import check_assignment, check_overrides, hooks_of, overrides
from stepmark.trainer.compat.parameter_queries import ParameterQueries
from stepmark.trainer.compat.transformers_arguments import check_kinds, converted
from stepmark.trainer.evaluation_methods import EvaluationMethods
from stepmark.trainer.interruption.pausable_evaluation import PausableEvaluation
from stepmark.trainer.interruption.silent_ranks import watch_peers
from stepmark.trainer.loaders import LoaderFactory, default_collator
from stepmark.trainer.results import TrainOutput
from stepmark.trainer.resume import TRAINER_STATE
from stepmark.trainer.run_folder.adapters import Adapter, adapter_of
from stepmark.trainer.run_folder.earlier_attempt import part_from_earlier_attempt
from stepmark.trainer.run_folder.finished_runs import finished, set_aside_finished_run
from stepmark.trainer.run_folder.hub_uploads import HubCallback, HubMethods, check_hub
from stepmark.trainer.run_folder.model_export import write_model
from stepmark.trainer.run_folder.outputs import SavedFiles, prepare_output_folder, write_model_files
from stepmark.trainer.run_folder.run_identity import identity
from stepmark.trainer.run_folder.run_log import RunLog
from stepmark.trainer.run_folder.special_tokens import align_special_tokens
from stepmark.trainer.run_results import RunResults, record_end
from stepmark.trainer.script_methods import ScriptMethods
from stepmark.trainer.setup import (
    RunParts,
    check_packed,
    check_start,
    compile_as_asked,
    count_steps,
    make_checkpointer,
    make_schedule,
    prepare_model,
    reporters,
    reports,
    step_optimizer,
    tensors_of,
)
from stepmark.trainer.training_arguments import TrainingArguments
from stepmark.trainer.training_loop import TrainingLoop
from stepmark.training.loss import MicroBatchLoss
from stepmark.training.loss_scaler import LossScaler
from stepmark.training.micro_batches import autocast, autocast_dtype
from stepmark.training.model_wrappers import without_wrapper
from stepmark.training.noisy_embeddings import noisy_embeddings
from stepmark.training.step import TrainStep

NEED_COMPLETE_MODEL = ("compute_loss", "prediction_step")  # methods that call it where they are replaced


class _NoAccelerate:
    """Says what to use instead where it is read; a script may set the attribute."""

    def __get__(self, trainer: Any, kind: type) -> Any:
        raise AttributeError(
            f"{kind.__name__!r} object has no attribute 'accelerator': Stepmark does not use accelerate; return a "
            "loader as it is instead of accelerator.prepare(loader); see also args.device and is_world_process_zero()"
        )


@explains_keywords
class Trainer(EvaluationMethods, ParameterQueries, ScriptMethods, HubMethods):
    """Trains, evaluates and saves a model on one rank or many, on any device; every rank makes the same calls.

    A subclass may override `compute_loss`, `get_train_dataloader`, `get_eval_dataloader`, `create_optimizer`,
    `create_scheduler`, `create_optimizer_and_scheduler`, `prediction_step`, `evaluate`, `log` and `save_model`, which
    are called as transformers' Trainer calls them. A class that overrides another hook of transformers is an error.

    Args:
        model: A module that returns the mean loss of a batch, such as transformers' models; one that sums its losses
            must divide by a `num_items_in_batch` that its forward takes. It is moved to the device and sharded as
            `args` says, unless `load_for_parallelism` or `parallelize` has sharded it; its Parameters stay the same
            objects. Of one in DistributedDataParallel the module inside is used.
        args: What to do; default: `TrainingArguments()`. transformers' own are converted; those of its fields that
            Stepmark lacks must have their default values.
        data_collator: Makes a batch of a list of samples; a `PadTo` states the lengths to pad to. Default: that of
            transformers' Trainer: a tokenizer or feature extractor as `processing_class` pads samples, which are
            stacked without one; samples of Stepmark's own datasets are padded as these need.
        train_dataset: Returns sample i, or can only be iterated, which without a length needs `max_steps`; needed by
            `train`. The ranks take the batches of the latter in turn; a resumed run goes on after the samples taken.
        eval_dataset: The same for `evaluate`, or several by name.
        processing_class: The tokenizer; it is saved with the model. Default for that: `data_collator.tokenizer`.
        model_init: Makes the model, instead of `model`, with `seed`: once here, and again for every further `train()`.
        compute_loss_func: `(outputs, labels, num_items_in_batch)` to a loss, instead of the model's own: a mean over
            the targets of the micro-batch, or a sum divided by `num_items_in_batch`, which is the number of targets of
            the micro-batch (in transformers: of the step). Both give the mean over the step's targets, for any
            accumulation and number of ranks.
        compute_metrics: An `EvalPrediction` to numbers by name, which are added to evaluations.
        callbacks: transformers' `TrainerCallback` objects or classes. `on_save` is called when the checkpoint is
            complete on disk, also with `async_save`, so a callback may read it and add files to it.
        optimizers: (optimizer, schedule); each that is None is made from `args`.
        preprocess_logits_for_metrics: `(logits, labels)` to what `compute_metrics` gets as predictions.

    Attributes:
        loss_averages_over: `samples` where the loss is a mean over samples although batches have labels that can be
            counted, or `targets`. A subclass with such a `compute_loss` sets it; else it is that of `compute_loss_func`
            or of the model, and by default `targets`: batches are weighted by the labels that are not -100.
        optimizer: The `torch.optim` optimizer of the run; None before `create_optimizer`.
        lr_scheduler: The schedule of the run; None before `create_scheduler`.
        checkpoint_files: Functions that are called with the folder of a new checkpoint, on rank 0, and may write files
            there, which are then part of the checkpoint.

    Raises:
        UsageError: The arguments do not fit together, or not the model.
        DeviceError: There is no such device.
    """

    loss_averages_over: str | None = None
    accelerator = _NoAccelerate()

    def __init_subclass__(cls, **options: Any) -> None:
        """Raises UsageError where the class overrides a method that would never be called."""
        super().__init_subclass__(**options)
        check_overrides(cls, _OWN_HOOKS)

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
    ) -> None:
        check_overrides(type(self), _OWN_HOOKS)
        self.args: TrainingArguments = converted(args)
        self._memory_tracker = TrainerMemoryTracker(self.args.skip_memory_metrics)
        self._memory_tracker.start()
        set_log_level(self.args)
        check_restarts(self.args.max_restarts)
        model, self._factory = model_of(model, model_init, self.args.seed)
        model = without_wrapper(model)
        check_kinds(data_collator=data_collator, train_dataset=train_dataset, eval_dataset=eval_dataset)
        check_kinds(callbacks=callbacks, optimizers=optimizers)
        check_packed(model, train_dataset, eval_dataset)
        prepare_compile_cache(self.args.compile_cache)
        self.context: Context = start(self.args.device_name, self.args.join_timeout)
        open_compile_cache(self.context.runtime, self.args.compile_cache, self.context.world)
        self.mesh = prepare_model(model, self.args, self.context)
        compile_as_asked(model, self.args, self.mesh)
        self.model = model
        self._saved = adapter_of(model) or model
        for name in NEED_COMPLETE_MODEL:
            self._check_pipeline(name, self._overridden(name))
        if self.args.batch_eval_metrics and compute_metrics is not None:
            check_by_batch(compute_metrics)
        self._default_collator = default_collator(processing_class)
        self.data_collator = self._default_collator if data_collator is None else data_collator
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.processing_class = processing_class
        self.compute_metrics = compute_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self._made: tuple[Any, Any] = (None, None)  # the optimizer and the schedule of the run before
        self._step_optimizer: StepOptimizer | None = None
        self._made_tensors: set[int] = set()  # that it updates
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.compute_loss_func = compute_loss_func
        self._pausable: PausableEvaluation | None = None  # that of the evaluation in the training loop
        self._saved_files = SavedFiles(Path(self.args.output_dir), self.context.host)
        self.checkpoint_files: list[Callable[[Path], None]] = []
        self._callbacks = RunCallbacks(
            self.args,
            [each for each in (*reporters(self.args), *(callbacks or ())) if _is_called(each)],
            model,
            processing_class,
            RunLog(Path(self.args.output_dir), writes=self.is_world_process_zero() and not extracting_graphs()),
            leads_node=self.context.world.local_rank == 0,
            log=lambda logs: self.log(logs),
        )
        if self.args.push_to_hub and not extracting_graphs():
            self._upload_checkpoints()
        self._watch: PeerWatch | None = None  # for the next run, where other ranks may wait for this one
        if self.context.store is not None and not extracting_graphs():
            self._watch = watch_peers(self.mesh, self._callbacks)
            self._watch.start()
            weakref.finalize(self, self._watch.close)
        self._callbacks.event("on_init_end")
        self._memory_tracker.stop_and_update_metrics()

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute, which the next call of `train` or `evaluate` uses, as in transformers.

        Raises:
            UsageError: Setting it would have no effect: another model, or a hook that is never called; or a pipeline
                rules it out.
        """
        check_assignment(self, name, value)
        self._check_pipeline(name, name in NEED_COMPLETE_MODEL)
        if name in ("train_dataset", "eval_dataset"):
            check_packed(self.model, value, may_call=False)
        super().__setattr__(name, value)
        if name == "compute_loss" and "loss" in vars(self):
            self.loss.override = self._overridden_loss
        elif name == "loss_averages_over" and "loss" in vars(self):
            self._set_loss()

    def _upload_checkpoints(self) -> None:
        """Creates the repository, and uploads checkpoints as `hub_strategy` says."""
        check_hub(self.args, self.mesh.tensor_parallel.size * self.mesh.pipeline.size)
        self.init_hf_repo()
        if self.args.hub_strategy != "end":
            self.add_callback(HubCallback(self._repository))

    def _check_pipeline(self, name: str, replaced: bool) -> None:
        """Raises UsageError for a replaced method that calls the complete model, where no rank has it."""
        if replaced and self.mesh.pipeline.size > 1:
            raise UsageError(
                f"{name} and pipeline_parallel_size: a {name} of your own calls the complete model, and each rank has "
                "a stage of it; pass compute_loss_func, preprocess_logits_for_metrics or compute_metrics, which get "
                "the last stage's outputs, or set pipeline_parallel_size to 1"
            )

    def _overridden(self, name: str) -> bool:
        """Whether a subclass, or an attribute that was set, replaces a method."""
        return overrides(self, _OWN_HOOKS, name)

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
        if _is_called(callback):
            self._callbacks.handler.add_callback(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Removes a callback, or the first one of a class, and returns it; None where there is none."""
        removed: TrainerCallback | None = self._callbacks.handler.pop_callback(callback)
        return removed

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Removes a callback, or the first one of a class."""
        self._callbacks.handler.remove_callback(callback)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds values to the history, to metrics.jsonl and to the callbacks' logs, with the current step and epoch.

        Everything that a run logs passes through this method. A subclass may override it, to add values for example.

        Args:
            logs: Plain numbers by name.
            start_time: Not used: logs have their own measurements. transformers' signature has it.
        """
        self._callbacks.record(logs)

    # Parts

    @property
    def _autocast_dtype(self) -> torch.dtype | None:
        return autocast_dtype(bf16=self.args.bf16, fp16=self.args.fp16)

    def is_world_process_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.context.host.rank == 0

    def is_local_process_zero(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.context.world.local_rank == 0

    def train_loader(self) -> DataLoader:
        """Returns a new loader of the training data, at its beginning.

        Raises:
            UsageError: There is no training data.
        """
        if self.train_dataset is None:
            raise UsageError("train_dataset: training needs one")
        return self._loaders.train_loader(self.train_dataset)

    def get_train_dataloader(self) -> Any:
        """Returns the batches of the training data. A subclass may return any iterable of batches of its own.

        The order of such an iterable is kept. The ranks take its batches in turn, unless its sampler is one of each
        rank, such as DistributedSampler. Its position is saved if it has `state_dict` and `load_state_dict`; otherwise
        a resumed run skips the batches that were taken.

        Returns:
            An iterable with a length and a `dataset`, of this rank's batches on the host.

        Raises:
            UsageError: There is no training data.
        """
        if self.train_dataset is None:
            raise UsageError("train_dataset: training needs one")
        if self._overridden("_get_train_sampler"):
            return self._loaders.sampled_batches(self.train_dataset, call_sampler(self))
        return self._loaders.train_batches(self.train_dataset)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        """Returns a sampler of the training data. A subclass may override it: then the samples come in the order of
        what it returns, and a resumed run skips the batches that were taken."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        return sampler_of(dataset, self.args.train_sampling_strategy)

    def get_eval_dataloader(self, eval_dataset: str | Dataset | None = None) -> Any:
        """Returns the batches of evaluation data, in order. A subclass may return any iterable of batches of its own.

        Args:
            eval_dataset: The data, or the name of one of the Trainer's sets; default: the Trainer's own.

        Returns:
            An iterable as that of `get_train_dataloader`.

        Raises:
            UsageError: There is no evaluation data.
        """
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            assert isinstance(self.eval_dataset, Mapping)
            dataset = self.eval_dataset[dataset]
        if dataset is None:
            raise UsageError("eval_dataset: evaluation needs one")
        return self._loaders.eval_batches(dataset)

    def get_test_dataloader(self, test_dataset: Dataset) -> Any:
        """Returns the batches of the data of `predict`, as `get_eval_dataloader` does."""
        return self._loaders.eval_batches(test_dataset)

    @property
    def _loaders(self) -> LoaderFactory:
        own = None if self.data_collator is self._default_collator else self.data_collator
        theirs = str(getattr(self.prediction_step, "__module__", "")).partition(".")[0] != "stepmark"
        own_loss = self.loss.override is not None or theirs
        return LoaderFactory(self.args, self.model, self.mesh, self.loss, own, self.processing_class, own_loss)

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
            self._step_optimizer = step_optimizer(model or self.model, self.args, self.mesh)
            self.optimizer = self._step_optimizer.inner
            self._made_tensors = tensors_of(self.optimizer)
        return self.optimizer

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
            self.lr_scheduler = make_schedule(self.args, optimizer, num_training_steps)
        return self.lr_scheduler

    def _make_optimizer_and_schedule(self, total_steps: int) -> tuple[StepOptimizer, Any]:
        """Those of a run. Made for an earlier run, they are made again; others stay."""
        if self.optimizer is not None and self.optimizer is self._made[0]:
            self.optimizer = None
        if self.lr_scheduler is not None and self.lr_scheduler is self._made[1]:
            self.lr_scheduler = None
        given = self.optimizer, self.lr_scheduler
        self.create_optimizer_and_scheduler(total_steps)
        if self.optimizer is None or self.lr_scheduler is None:
            raise UsageError(
                "create_optimizer_and_scheduler: it has set no optimizer or no lr_scheduler; set both attributes"
            )
        self._made = (
            self.optimizer if given[0] is None else None,
            self.lr_scheduler if given[1] is None else None,
        )
        made = self._step_optimizer
        if made is not None and made.inner is self.optimizer and tensors_of(made.inner) == self._made_tensors:
            return made, self.lr_scheduler
        return step_optimizer(self.model, self.args, self.mesh, self.optimizer), self.lr_scheduler

    def make_step(self, optimizer: StepOptimizer) -> TrainStep:
        return TrainStep(
            self.model,
            optimizer,
            self.loss,
            self.mesh,
            accumulation=self.args.gradient_accumulation_steps,
            pipeline_schedule=self.args.pipeline_schedule,
            max_grad_norm=self.args.max_grad_norm,
            autocast=self._autocast_dtype,
            scaler=LossScaler() if self.args.fp16 else None,
            reduce_dtype=getattr(torch, self.args.reduce_dtype),
            seed=self.args.seed,
        )

    def identity(self) -> dict[str, Any]:
        """Returns what a resumed run must have in common with the one that saved, as plain values."""
        own = identity(self.model, self.processing_class, self.train_dataset, self.args.seed, self._loaders.data_seed)
        return own | (self._saved.identity(self.mesh) if isinstance(self._saved, Adapter) else {})

    # The loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | float | None = None,
    ) -> Any:
        """Computes the loss of one batch: the model's own, the smoothed one, or that of `compute_loss_func`.

        A subclass may override it, and return a mean over the batch, or a sum divided by `num_items_in_batch`. Batches
        are weighted by their targets, so that either is the mean over a complete step on all ranks.

        Args:
            model: The model.
            inputs: A batch on the device.
            return_outputs: Also return the model's outputs. Default: False.
            num_items_in_batch: The targets of this batch (a 0-dim tensor), which a summed loss is divided by. Default:
                as many as the batch has.

        Returns:
            The loss, a 0-dim tensor, or a tuple of it and the outputs.
        """
        loss, outputs = self.loss.mean(model, inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _overridden_loss(self, model: nn.Module, inputs: Any, items: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return call_compute_loss(self.compute_loss, type(self).__name__, model, inputs, items)

    def compute_loss_context_manager(self) -> torch.autocast:
        """Returns the context in which models are called: autocast, as `bf16` and `fp16` say."""
        return autocast(self.context.runtime, self._autocast_dtype)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """The batch on the device, for a subclass that calls it; batches that the Trainer passes are there already."""
        return self.context.runtime.place(inputs)

    @property
    def compute_loss_func(self) -> Callable[..., torch.Tensor] | None:
        """The loss in place of the model's own; it may be set."""
        return self._compute_loss_func

    @compute_loss_func.setter
    def compute_loss_func(self, function: Callable[..., torch.Tensor] | None) -> None:
        self._compute_loss_func = function
        self._set_loss()

    @property
    def label_names(self) -> list[str]:
        """The names of the inputs that are labels; they may be set."""
        return list(self.loss.labels.names)

    @label_names.setter
    def label_names(self, names: Sequence[str]) -> None:
        self.args.label_names = list(names)
        self._set_loss()

    def _set_loss(self) -> None:
        self.loss = MicroBatchLoss(
            self.model,
            compute_loss_func=self._compute_loss_func,
            label_smoothing=self.args.label_smoothing_factor,
            label_names=self.args.label_names,
            lazy=self.context.runtime.lazy,
            declared_by=self,
        )
        if self._overridden("compute_loss"):
            self.loss.override = self._overridden_loss

    # Training

    def train(self, resume_from_checkpoint: bool | str | None = None, *, save_model: bool = False) -> TrainOutput:
        """Trains to the end of the run. Collective.

        Args:
            resume_from_checkpoint: A checkpoint to continue from, or True for the newest complete one in `output_dir`
                (from the beginning where there is none). Default: that of the arguments.
            save_model: Also write the final model, and with an `eval_strategy` its evaluation, to `output_dir` before
                the run's status becomes `done`.

        Returns:
            The number of steps, the mean training loss over all tokens of the run, and the values of
            train_results.json. A finished run that is resumed keeps its results.

        Raises:
            CheckpointError: The checkpoint cannot be resumed from, or a save failed.
            UsageError: There is no training data, or `output_dir` cannot be used.
            StepmarkError: The final model cannot be written, for example because the disk is full.
            RunInterrupted: A signal stopped the run, which can be resumed (a SystemExit with code 75).
        """
        self._memory_tracker.start()
        watch, self._watch = self._watch or watch_peers(self.mesh, self._callbacks), None
        watch.begin()
        try:
            output = self._train_watched(watch, resume_from_checkpoint, save_model)
        finally:
            watch.close()
        self._memory_tracker.stop_and_update_metrics(output.metrics)
        return output

    def _train_watched(
        self, watch: PeerWatch, resume_from_checkpoint: bool | str | None, save_model: bool
    ) -> TrainOutput:
        resume = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        folder = Path(self.args.output_dir)
        prepare_output_folder(folder, self.context.host)
        self._callbacks.reset()
        if self._factory is not None:
            self._factory.begin_run(self.model, self.mesh)
        align_special_tokens(self.model, self.processing_class)
        with make_checkpointer(folder, self.args, self.mesh) as checkpointer:
            parts = self.make_parts()
            loop = TrainingLoop(
                parts,
                self._callbacks,
                checkpointer,
                evaluate=self._evaluate_own_data,
                write_files=self._write_files,
                before_save=self._collect_model_files,
            )
            goes_on = bool(resume) or set_aside_finished_run(folder, self.context.host)
            check_start(folder, self._saved, self.args, self.context, resumes=goes_on)
            if self.args.eval_strategy != "no":
                self._eval_sets()
                _ = self.prompt_sampler  # which says now what it cannot continue
            if self.args.save_strategy != "no":
                checkpointer.claim()
                loop.withdraw_stop_request()
            own = parts.loader  # callbacks get a second loader, whose position is not that of the run
            self._callbacks.show(parts, own.given if isinstance(own, GivenLoader) else own.again())
            try:
                with loop.stopping_at_signals(), watch:
                    if self.args.eval_strategy != "no" and not extracting_graphs():
                        self.try_metrics()
                    restored = loop.resume(Path(resume) if isinstance(resume, str) else None) if resume else None
                    if restored is None and not extracting_graphs():
                        part_from_earlier_attempt(
                            folder, self.context.host, resumes=bool(resume), repeats=loop.record_resumption
                        )
                    output = self._train(loop, parts, checkpointer, restored)
                if save_model:
                    self.save_model()
                    if self.args.eval_strategy != "no":
                        sets = [dataset for _, dataset in self._eval_sets()]
                        self._results.write_evaluation(self.final_evaluation(), sets)
                with self._results.writing():
                    self._callbacks.run_log.status("done", self.state.global_step, loop.stop_reason)
                finished(folder)
                return output
            except BaseException as error:
                record_end(self._callbacks, error, self.context.host)
                raise
            finally:
                parts.step.close()
                self._callbacks.close()

    def make_parts(self) -> RunParts:
        """Makes what a run needs before its first step, such as the optimizer."""
        loader = self._loaders.steps_of(self.get_train_dataloader(), self.args.gradient_accumulation_steps)
        total_steps = count_steps(self.args, loader)
        optimizer, schedule = self._make_optimizer_and_schedule(total_steps)
        return RunParts(
            args=self.args,
            context=self.context,
            mesh=self.mesh,
            model=self.model,
            saved=self._saved,
            loader=loader,
            optimizer=optimizer,
            schedule=schedule,
            step=self.make_step(optimizer),
            total_steps=total_steps,
            identity=self.identity(),
            data=getattr(self.train_dataset, "description", None),
            evaluation=self._run_options(),
        )

    def _run_options(self) -> RunOptions:
        """How the run evaluates, for evaluations of its checkpoints elsewhere."""
        dataset = self.train_dataset if self.eval_dataset is None else self.eval_dataset
        own = self.compute_loss if self._overridden("compute_loss") else self._compute_loss_func
        return RunOptions.of_training(
            self.args,
            block_size=getattr(dataset, "block_size", None),
            metrics=function_name(self.compute_metrics),
            loss=function_name(own),
            columns=getattr(dataset, "sample_columns", None),
        )

    def _train(
        self, loop: TrainingLoop, parts: RunParts, checkpointer: Checkpointer, restored: Path | None
    ) -> TrainOutput:
        callbacks, first, evaluating = self._callbacks, self.state.global_step, loop.is_evaluating
        loop.begin(restored)
        began = time.perf_counter()
        callbacks.event("on_train_begin")
        with noisy_embeddings(self.model, self.args.neftune_noise_alpha):
            loop.run(restored)
        seconds, steps = time.perf_counter() - began, self.state.global_step - first
        mean_loss, machine = loop.mean_loss(), loop.closing_fields()
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            checkpointer.restore({"model": self._saved}, Path(self.state.best_model_checkpoint))
            callbacks.best_step = self.state.best_global_step
        samples = steps * parts.loader.layout.global_batch
        metrics = {
            "epoch": self.state.epoch,
            "total_flos": self.state.total_flos,
            "train_loss": mean_loss,
            "train_runtime": seconds,
            "train_samples_per_second": samples / seconds,
            "train_steps_per_second": steps / seconds,
        }
        if steps or evaluating:  # a process that found the run finished has trained nothing
            callbacks.log({name: value for name, value in metrics.items() if name != "epoch"}, machine)
        callbacks.event("on_train_end")
        if self._repository is not None:
            self._repository.wait()
        self.context.host.barrier()  # the run is done where no rank hangs in a callback
        metrics = self._results.write_training(metrics, steps, self.train_dataset)
        if self.is_world_process_zero() and not extracting_graphs():
            with self._results.writing():
                self._write_state(Path(self.args.output_dir))
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    # Saving

    @property
    def _results(self) -> RunResults:
        return RunResults(Path(self.args.output_dir), self._callbacks.run_log, self.context.host)

    @property
    def _saved_processing(self) -> Any:
        """What is saved beside the model: `processing_class`, or else that of the collator, as in transformers."""
        collator = self.data_collator
        if isinstance(collator, PadTo):
            collator = collator.collate_fn
        found = (self.processing_class, *(getattr(collator, name, None) for name in ("processor", "tokenizer")))
        return next((each for each in found if each is not None), None)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the model as a Hugging Face folder: weights, config and tokenizer. Collective.

        If a subclass overrides it, it is also called for every checkpoint: the files that it writes are added. Called
        from there, this method writes no weights, which a checkpoint has already.

        Args:
            output_dir: Where to; default: the run's folder.
            _internal_call: True where the call is for a checkpoint, as in transformers.

        Raises:
            StepmarkError: The folder cannot be written to; on all ranks.
        """
        folder = Path(output_dir or self.args.output_dir).absolute()
        if self._saved_files.collects(folder):
            if self.is_world_process_zero():
                write_model_files(folder, self._saved, self._saved_processing)
            return
        if extracting_graphs():
            warn_not_saved(f"the model in {folder}")
            return
        write_model(folder, self._saved, self.mesh, self._saved_processing, self.args.save_timeout)

    def _collect_model_files(self) -> None:
        """Before a checkpoint: lets an overridden `save_model` write the files that the checkpoint gets. Collective."""
        if self._overridden("save_model"):
            self._saved_files.collect(self.save_model)

    def _write_files(self, folder: Path) -> None:
        if self._overridden("save_model"):
            self._saved_files.move_to(folder)
        else:
            write_model_files(folder, self._saved, self._saved_processing)
        for write in self.checkpoint_files:
            write(folder)
        self._write_state(folder)

    def _write_state(self, folder: Path) -> None:
        self._callbacks.exportable_state().save_to_json(str(folder / TRAINER_STATE))


def _is_called(callback: TrainerCallback | type[TrainerCallback]) -> bool:
    """Whether a callback takes part in the run; none that reports values does while they are placeholders."""
    return not (extracting_graphs() and reports(callback))


_OWN_HOOKS = hooks_of(Trainer)
