"""The Trainer: transformers' names and calling conventions over Stepmark's public parts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers.trainer_callback import (
    CallbackHandler,
    ExportableState,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.trainer_utils import EvalPrediction

from stepmark.config.training_arguments import TrainingArguments, set_log_level
from stepmark.data.collate import PadTo
from stepmark.data.loader import DataLoader
from stepmark.errors import DataError, UsageError
from stepmark.evaluation.evaluate import named_sets
from stepmark.evaluation.evaluator import Evaluation, Evaluator
from stepmark.evaluation.metrics import summarize
from stepmark.launch.process_exit import say
from stepmark.optim.protocols import StepOptimizer
from stepmark.runtime.context import Context, start
from stepmark.runtime.xla_environment import extracting_graphs, warn_not_saved
from stepmark.trainer.interruption.pausable_evaluation import PausableEvaluation
from stepmark.trainer.interruption.peer_watch import watch_of
from stepmark.trainer.interruption.preemption import RunInterrupted
from stepmark.trainer.model_export import write_model
from stepmark.trainer.outputs import prepare_output_folder, write_model_files
from stepmark.trainer.results import PredictionOutput, TrainOutput, evaluation_line
from stepmark.trainer.run_identity import identity
from stepmark.trainer.setup import (
    check_start,
    make_checkpointer,
    make_optimizer,
    make_schedule,
    prepare_model,
    reporters,
)
from stepmark.trainer.strategies import StrategyCallback
from stepmark.trainer.telemetry.progress import ProgressDisplay
from stepmark.trainer.telemetry.run_log import RunLog
from stepmark.trainer.training_loop import TrainingLoop
from stepmark.training.loss import MicroBatchLoss
from stepmark.training.step import TrainStep

logger = logging.getLogger(__name__)


class Trainer:
    """Trains, evaluates and saves a model on one rank or many, on any device; every rank makes the same calls.

    `model` is moved to the device, cut as `args` says unless it was made so by `load_for_parallelism` or `parallelize`
    (its Parameters stay the same objects). `optimizers` is (optimizer, schedule), each
    or both None: then they are made from `args`. `callbacks` are transformers' TrainerCallback objects or classes.

    Raises UsageError or DeviceError before anything expensive is done.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        processing_class: Any = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        preprocess_logits_for_metrics: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        self.args = args or TrainingArguments()
        set_log_level(self.args)
        self.context: Context = start(self.args.device)
        self.mesh = prepare_model(model, self.args, self.context)
        self.model = model
        self.data_collator = data_collator
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.processing_class = processing_class
        self.compute_metrics = compute_metrics
        self._optimizers = optimizers
        self._begun = False  # training has begun, so that how it ends is this run's to tell
        self._trains = False  # it goes on
        self._last_evaluation: tuple[int, dict[str, float]] | None = None
        self.pausing: PausableEvaluation | None = None  # for the next evaluation
        self.loss = MicroBatchLoss(
            model,
            compute_loss_func=compute_loss_func,
            label_smoothing=self.args.label_smoothing_factor,
            lazy=self.context.runtime.lazy,
        )
        self.evaluator = Evaluator(
            model,
            self.loss,
            self.context.runtime,
            self.context.host,
            self._autocast_dtype,
            preprocess_logits_for_metrics,
            reporting=self.mesh.reporting_ranks,
        )
        writes = self.is_world_process_zero() and not extracting_graphs()
        self.journal = RunLog(Path(self.args.output_dir), writes=writes)
        self.display = ProgressDisplay(shows=False, total=0, done=0)
        self.state = self._fresh_state()
        self.control = TrainerControl()
        self.callback_handler: Any = CallbackHandler(
            [StrategyCallback, *reporters(self.args), *(callbacks or ())], model, processing_class, None, None
        )
        self.event("on_init_end")

    # Parts

    @property
    def _autocast_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.args.bf16 else None

    def _fresh_state(self) -> TrainerState:
        return TrainerState(
            is_local_process_zero=self.context.world.local_rank == 0,
            is_world_process_zero=self.is_world_process_zero(),
        )

    def is_world_process_zero(self) -> bool:
        return self.context.host.rank == 0

    def train_loader(self) -> DataLoader:
        """The loader of the training data, at its beginning."""
        if self.train_dataset is None:
            raise UsageError("train_dataset: training needs one")
        return self._loader(
            self.train_dataset,
            self.args.per_device_train_batch_size,
            accumulation=self.args.gradient_accumulation_steps,
            seed=self.data_seed,
            drop_last=self.args.dataloader_drop_last,
        )

    @property
    def data_seed(self) -> int:
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

    def _loader(self, dataset: Any, batch_size: int, **options: Any) -> DataLoader:
        padded = self.data_collator if isinstance(self.data_collator, PadTo) else None
        return DataLoader(
            dataset,
            batch_size,
            rank=self.mesh.data_parallel.rank,
            world_size=self.mesh.data_parallel.size,
            collate_fn=padded.collate_fn if padded else self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            fixed_shape=self.context.runtime.lazy,
            pad_to=padded.lengths if padded else None,
            pad_token_id=getattr(self.processing_class, "pad_token_id", None) or 0,
            labels=self.loss.labels,
            **options,
        )

    def make_optimizer(self) -> StepOptimizer:
        """The optimizer that the user gave, or the one that the arguments name."""
        return make_optimizer(self.model, self.args, self.mesh, self._optimizers[0])

    def make_schedule(self, optimizer: StepOptimizer, total_steps: int) -> Any:
        """The schedule that the user gave, or the one that the arguments name."""
        return self._optimizers[1] or make_schedule(self.args, optimizer.inner, total_steps)

    def make_step(self, optimizer: StepOptimizer) -> TrainStep:
        return TrainStep(
            self.model,
            optimizer,
            self.loss,
            self.mesh,
            accumulation=self.args.gradient_accumulation_steps,
            max_grad_norm=self.args.max_grad_norm,
            autocast=self._autocast_dtype,
            seed=self.args.seed,
        )

    def identity(self) -> dict[str, Any]:
        """What a resumed run must have in common with the one that saved."""
        return identity(self.model, self.processing_class, self.train_dataset, self.args.seed, self.data_seed)

    # Training

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Trains to the end, from the beginning or from a checkpoint: a path, or True for the newest whole one in
        `output_dir` (from the beginning where there is none).

        Raises CheckpointError where the checkpoint cannot be resumed from; nothing that exists is lost then.
        """
        resume = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        folder = Path(self.args.output_dir)
        prepare_output_folder(folder, self.context.host)
        self.state, self.control, self._begun = self._fresh_state(), TrainerControl(), False
        with make_checkpointer(folder, self.args, self.mesh) as checkpointer:
            run = TrainingLoop(self, checkpointer)
            check_start(folder, self.model, self.args, self.context, resumes=bool(resume))
            if self.args.eval_strategy != "no":
                self._eval_sets(None, "eval")
            if self.args.save_strategy != "no":
                checkpointer.claim()
                run.forget_request()
            self._begin(run)
            try:
                with run.stopping_at_signals(), watch_of(self):
                    restored = run.resume(Path(resume) if isinstance(resume, str) else None) if resume else None
                    return self._train(run, restored)
            except BaseException as error:
                self._tell_end(error)
                raise
            finally:
                self._trains = False
                self.display.close()

    def _tell_end(self, error: BaseException) -> None:
        if isinstance(error, RunInterrupted):
            self.journal.try_status("interrupted", self.state.global_step, error.reason)
            if self.is_world_process_zero():
                say(f"interrupted by {error.reason}")
        elif self._begun:  # else what an earlier run has left stands
            state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            self.journal.try_status(state, self.state.global_step, f"{type(error).__name__}: {error}")

    def _train(self, run: TrainingLoop, restored: Path | None) -> TrainOutput:
        run.monitor.started(self, run.total_steps, restored)
        if restored is not None:
            attempt = self.journal.attempts() + 1
            mesh = self.mesh.shape
            self.journal.metrics({"resumed": self.state.global_step, "attempt": attempt, "mesh": mesh})
        self.display = ProgressDisplay(
            shows=self.is_world_process_zero() and not self.args.disable_tqdm,
            total=run.total_steps,
            done=self.state.global_step,
        )
        if restored is not None:
            self.display.line(f"resumed from {restored} at step {self.state.global_step}")
        self.journal.status("running", self.state.global_step)
        self._begun = self._trains = True
        started, first = time.perf_counter(), self.state.global_step
        self.event("on_train_begin")
        if self.args.eval_on_start and restored is None:
            run.evaluate()
        run.loop(self.display)
        run.end()
        return self._finish(run, time.perf_counter() - started, self.state.global_step - first)

    def _begin(self, run: TrainingLoop) -> None:
        state = self.state
        state.max_steps = run.total_steps
        state.num_train_epochs = max(1, -(-run.total_steps // run.loader.steps_per_epoch))
        state.train_batch_size = self.args.per_device_train_batch_size
        state.compute_steps(self.args, run.total_steps)
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, run.optimizer.inner, run.schedule
        handler.train_dataloader = run.loader

    def _finish(self, run: TrainingLoop, seconds: float, steps: int) -> TrainOutput:
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            run.checkpointer.restore({"model": self.model}, Path(self.state.best_model_checkpoint))
        samples = steps * run.loader.layout.global_batch
        metrics = {
            "epoch": self.state.epoch,
            "train_loss": run.means.mean_loss(),
            "train_runtime": seconds,
            "train_samples_per_second": samples / seconds,
            "train_steps_per_second": steps / seconds,
        }
        self.event("on_train_end")
        self.journal.results("train", {**metrics, "train_samples": len(self.train_dataset)})  # type: ignore[arg-type]
        if self.is_world_process_zero() and not extracting_graphs():
            self._full_state().save_to_json(str(Path(self.args.output_dir) / "trainer_state.json"))
        self.journal.status("done", self.state.global_step, run.asked_to_stop)
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    # Saving

    def save_checkpoint(self, run: TrainingLoop) -> None:
        """Saves all of a run's state as `checkpoint-<step>` in the output folder."""
        step = self.state.global_step
        if extracting_graphs():
            warn_not_saved(f"checkpoint-{step}")
            self.control.should_save = False
            return
        if self.state.best_global_step == step:
            self.state.best_model_checkpoint = str(Path(self.args.output_dir) / f"checkpoint-{step}")
        metric = self.args.best_metric_key
        evaluated, values = self._last_evaluation or (-1, {})
        last = values.get(metric) if metric is not None and evaluated == step else None
        handle = run.checkpointer.save(
            step,
            {"model": self.model} if self.args.save_only_model else run.sections(),
            files=self._write_files,
            metadata={"identity": run.identity, "model_only": self.args.save_only_model},
            model_only=self.args.save_only_model,
            metrics={metric: last} if metric is not None and last is not None else None,
        )
        run.note_save(handle)
        self.display.line(f"{'saving' if self.args.async_save else 'saved'} checkpoint-{step}")
        self.event("on_save")

    def save_model(self, output_dir: str | None = None) -> None:
        """Writes the model as a Hugging Face folder: weights, config and tokenizer. Collective."""
        folder = Path(output_dir or self.args.output_dir).absolute()
        if extracting_graphs():
            warn_not_saved(f"the model in {folder}")
            return
        write_model(folder, self.model, self.mesh, self.processing_class, self.args.save_timeout)

    def _write_files(self, folder: Path) -> None:
        write_model_files(folder, self.model, self.processing_class)
        self._full_state().save_to_json(str(folder / "trainer_state.json"))

    def _full_state(self) -> TrainerState:
        """The state with that of the callbacks which have one."""
        stateful: list[Any] = [cb for cb in self.callback_handler.callbacks if isinstance(cb, ExportableState)]
        holder = TrainerState(stateful_callbacks=stateful)
        self.state.stateful_callbacks = holder.stateful_callbacks
        return self.state

    # Evaluation

    def evaluate(
        self,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Loss and metrics over exactly the samples of `eval_dataset` (default: the Trainer's own), under keys that
        begin with the prefix; a dict of sets adds its keys to the prefix. Collective."""
        pausing, self.pausing = self.pausing, None
        found = {} if pausing is None else pausing.found
        metrics: dict[str, float] = {}
        for prefix, dataset in self._eval_sets(eval_dataset, metric_key_prefix):
            if prefix not in found:
                evaluation = self._evaluate(dataset, gather=self.compute_metrics is not None, pausing=pausing)
                found[prefix] = self._metrics(evaluation, prefix)
                self.log(found[prefix])
                self.display.line(evaluation_line(self.state.global_step, found[prefix], prefix))
                self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found[prefix])
            metrics |= found[prefix]
        if eval_dataset is None and metric_key_prefix == "eval":
            self._last_evaluation = (self.state.global_step, metrics)
        return metrics

    def _eval_sets(self, given: Any, prefix: str) -> list[tuple[str, Any]]:
        """The sets to evaluate, each with the prefix of its metrics. Raises where there is none, or an empty one."""
        dataset = self.eval_dataset if given is None else given
        if dataset is None:
            raise UsageError("eval_dataset: evaluation needs one")
        try:
            return named_sets(dataset, prefix)
        except DataError as error:
            raise DataError(f"eval_dataset: {error}, or set eval_strategy: no") from error

    def final_evaluation(self) -> dict[str, float]:
        """The evaluation of the model as it is now: the last one, where nothing was trained since."""
        if self._last_evaluation is not None and self._last_evaluation[0] == self.state.global_step:
            return self._last_evaluation[1]
        return self.evaluate()

    def predict(self, test_dataset: Dataset, metric_key_prefix: str = "test") -> PredictionOutput:
        """Predictions, labels and metrics over exactly the samples of `test_dataset`. Collective."""
        if not len(test_dataset):  # type: ignore[arg-type]
            raise DataError("test_dataset: it is empty; give one with samples")
        evaluation = self._evaluate(test_dataset, gather=True)
        metrics = self._metrics(evaluation, metric_key_prefix)
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, metrics)
        return PredictionOutput(evaluation.predictions, evaluation.labels, metrics)

    def _evaluate(self, dataset: Any, *, gather: bool, pausing: PausableEvaluation | None = None) -> Evaluation:
        loader = self._loader(dataset, self.args.per_device_eval_batch_size, shuffle=False)
        return self.evaluator(
            loader,
            gather=gather,
            before_batch=(lambda: None) if pausing is None else pausing.before_batch,
            after_batch=lambda: self.event("on_prediction_step"),
        )

    def _metrics(self, evaluation: Evaluation, prefix: str) -> dict[str, float]:
        return summarize(evaluation, prefix, causal=self.loss.causal_shift, compute_metrics=self.compute_metrics)

    # Callbacks and logs

    def event(self, name: str) -> None:
        """Calls `name` of every callback; they may set flags of the control."""
        self.control = getattr(self.callback_handler, name)(self.args, self.state, self.control)

    def log(self, logs: dict[str, float], machine: dict[str, float] | None = None) -> None:
        """Adds `logs` to the history, to metrics.jsonl and to the callbacks' logs, with the step and epoch. `machine`,
        which tells of the machine and not of the model, is no part of the history that checkpoints hold."""
        epoch = self.state.epoch
        self.state.log_history.append({**logs, "epoch": epoch, "step": self.state.global_step})
        logs = {**logs, **(machine or {})}
        self.journal.metrics({"step": self.state.global_step, "epoch": epoch, **logs})
        if self._trains:
            self.journal.status("running", self.state.global_step)
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, {**logs, "epoch": epoch})

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        self.callback_handler.add_callback(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        self.callback_handler.remove_callback(callback)
