"""The training loop of one run: steps and epochs, and the logs, evaluations and saves between them."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from transformers.trainer_callback import TrainerControl

from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.coordination.shared_memory import is_in_memory
from stepmark.checkpoint.format.checkpoint_folders import STOP_REQUEST, checkpoint_path, checkpoints, step_of
from stepmark.checkpoint.restore.restore import Restored, newest_of_both
from stepmark.checkpoint.sections import describe
from stepmark.data.loader.batch import StepBatch
from stepmark.data.loader.loader import DataLoader
from stepmark.data.loader.own_state import generators_kept_by
from stepmark.data.loader.prefetcher import DevicePrefetcher
from stepmark.errors import DataError, PeerLost, TrainingDiverged, UsageError
from stepmark.filesystem import files
from stepmark.filesystem.json_files import finite_number
from stepmark.launch.signal_listener import RunInterrupted
from stepmark.launch.step_board import StepPlace, show_step
from stepmark.liveness.process_exit import say
from stepmark.liveness.progress import BETWEEN, END, enter_phase
from stepmark.model_folder.consolidate import EVALUATION
from stepmark.runtime.seeds import derive_seed, seed_generators
from stepmark.runtime.xla_environment import extracting_graphs, warn_not_saved
from stepmark.sharding.logical_ranks import FIELD
from stepmark.trainer.callbacks import RunCallbacks, end_run, is_better
from stepmark.trainer.components import TrainingComponents
from stepmark.trainer.evaluation import EvaluationProgress
from stepmark.trainer.interruption.preemption import PreemptionCoordinator
from stepmark.trainer.interruption.run_end import reason_to_stop, record_end, record_stop
from stepmark.trainer.resume import ARITHMETIC, arithmetic_of, locate_best, restore_run
from stepmark.trainer.run_folder.log_history import read_state
from stepmark.trainer.run_folder.memory_snapshots import MemorySnapshots
from stepmark.trainer.run_folder.output_folder import check_start, set_aside_earlier_attempt, set_aside_finished_run
from stepmark.trainer.run_folder.run_log import POSITION, TRAINER_STATE
from stepmark.trainer.run_folder.run_mirror import RunMirror
from stepmark.trainer.run_folder.status import DONE, RunStatus
from stepmark.trainer.run_folder.time_spent import KEPT, TimeSpent
from stepmark.trainer.run_hooks import RunHooks
from stepmark.trainer.telemetry.banner import banner
from stepmark.trainer.telemetry.loss_meter import LossMeter, load_fields
from stepmark.trainer.telemetry.telemetry import Telemetry
from stepmark.trainer.telemetry.throughput import TotalFlos
from stepmark.trainer.user_changes import UserChanges
from stepmark.training.learning_rate_schedule import (
    advance,
    follows_metric,
    kept_by_functions,
    restore_schedule,
    schedule_state,
    shows_rates,
)
from stepmark.training.micro_batches import StepHooks
from stepmark.training.model_options import noisy_embeddings, set_training
from stepmark.training.pipelined_forward import EvaluationPaused

MAX_STEPS_WITHOUT_TARGETS = 100  # of a run in which no label was a target yet
ROLLBACK = "rollback"  # as on_loss_spike
PENDING = ("should_log", "should_evaluate")  # flags of callbacks that, at the end of an epoch, count after a save too
WRITTEN = "written to in on_save, after the checkpoint was made; do that in on_step_end"
FLAGS_AFTER_EVALUATION = ("should_save", "should_epoch_stop", "should_training_stop")

logger = logging.getLogger("stepmark")


class _LossSpike(Exception):
    """The run goes back. `args`: the first and the last spike, by step, and the checkpoint from before them."""


@dataclass(eq=False, repr=False)
class TrainingLoop:
    """Moves a run's state from step to step. All that a resumed run needs is in `sections`."""

    _parts: TrainingComponents
    _callbacks: RunCallbacks
    _checkpointer: Checkpointer
    _hooks: RunHooks
    _mirror: RunMirror
    _snapshots: MemorySnapshots

    def __post_init__(self) -> None:
        parts, callbacks = self._parts, self._callbacks
        self._args = parts.args
        self._monitor = Telemetry(parts, callbacks.run_log)
        counts = self._args.include_num_input_tokens_seen != "no"
        self._flos = TotalFlos(parts.model, parts.mesh if counts else None)
        look, filters = self._monitor.anomalies.look, self._args.logging_nan_inf_filter
        self._losses = LossMeter(parts.context.runtime, look, parts.step.experts, filters)
        self._epoch_open = False
        self._cut_epochs = False  # a callback has ended at least one epoch early
        self._ends = False  # a callback has stopped the run at the step that was restored
        self._unfinished: dict[str, Any] | None = None  # what is left of an evaluation in which the run was stopped
        self._preemption: PreemptionCoordinator | None = None
        self._first_step: int | None = None  # before which this process began; None until it trains
        self._saved_step = 0  # 0: there is nothing to save yet
        self._learning_rate = 0.0  # of the last step
        self._samples = 0  # that this process has trained, of all ranks
        self._changes: dict[str, str] = {}  # what the resumption has changed, in words
        self._spikes = self._monitor.spikes
        self._positions: dict[int, dict[str, Any]] = {}  # in the data, after steps that may be rolled back
        self._user_changes = UserChanges(parts, callbacks)
        self._kept_by_functions = kept_by_functions(parts.schedule)
        callbacks.before_hearing = parts.optimizer.gathers.wait
        if self._args.on_loss_spike == ROLLBACK and not isinstance(parts.loader, DataLoader):
            raise UsageError(
                "on_loss_spike: a rollback leaves samples out, which an iterable dataset or a loader of the program's "
                "own cannot; use warn"
            )
        if follows_metric(parts.schedule) and not self._args.best_metric_key and self._args.eval_strategy != "no":
            name = type(parts.schedule).__name__
            raise UsageError(f"metric_for_best_model: {name} follows a metric of evaluations; name it")
        self.stop_reason: str | None = None  # where the run was asked to stop from outside

    @property
    def _step(self) -> int:
        return self._callbacks.state.global_step

    # What is saved and restored

    def sections(self) -> dict[str, Any]:
        """What a checkpoint of this run holds, for `Checkpointer.save` and `Checkpointer.restore`."""
        return {"model": self._parts.saved, "optimizer": self._parts.optimizer, "run": self}

    def state_dict(self) -> dict[str, Any]:
        """Everything but tensors, as plain values."""
        scaler, own, now = self._parts.step.scaler, self._hooks.state(), vars(self._callbacks.state)
        numbers = self._parts.optimizer.changed_numbers() if self._parts.context.host.rank == 0 else {}
        return {
            **({"own": own} if own else {}),
            **({"optimizer": numbers} if numbers else {}),
            "step": self._step,
            "epoch": self._callbacks.state.epoch,
            "epoch_open": self._epoch_open,
            "cut_epochs": self._cut_epochs,
            "pending": [name for name in PENDING if getattr(self._callbacks.control, name)],
            "ends": self._callbacks.control.should_training_stop and self._parts.total_steps,
            "loader": self._parts.loader.state_dict(),
            "unfinished": self._unfinished,
            "means": self._losses.state_dict(),
            "user_changes": self._user_changes.state_dict(),
            "intervals": {name: now[name] for name, given in self._callbacks.intervals.items() if now[name] != given},
            "learning_rate": self._learning_rate,
            "schedule": schedule_state(self._parts.schedule, self._kept_by_functions),
            "rates": [float(group["lr"]) for group in self._parts.optimizer.inner.param_groups],
            "causal_shift": self._parts.step.loss.causal_shift,
            "loss_scaler": None if scaler is None else scaler.state_dict(),
            "spikes": None if self._spikes is None else self._spikes.state_dict(),  # after the numbers are read
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = self._parts.step.loss.causal_shift
        if state.get("causal_shift", own) != own:
            raise UsageError(f"causal_shift: is {own}, and was {not own} in this run; set it to {str(not own).lower()}")
        self._callbacks.state.global_step = state["step"]
        self._callbacks.state.epoch = state["epoch"]
        self._epoch_open = state["epoch_open"]
        self._cut_epochs = state.get("cut_epochs", False)
        for name in state.get("pending", ()):
            setattr(self._callbacks.control, name, True)
        self._ends = state.get("ends", False) in (True, self._parts.total_steps)  # True: by an earlier version
        self._unfinished = state.get("unfinished")
        loader, rates = state["loader"], list(state["rates"])
        if loader.get("imported"):
            loader = self._parts.loader.state_after(loader["step"], loader["epoch"])
            groups = len(self._parts.optimizer.inner.param_groups)  # the other tool may have had fewer
            rates = (rates * groups)[:groups]
        if self._changes.keys() & {"data", "data_seed"}:
            loader = {**self._parts.loader.state_dict(), "epoch": loader["epoch"], "samples": 0}
        self._parts.loader.load_state_dict(loader)
        self._losses.load_state_dict(state["means"])
        if "user_changes" in state:  # not in that of another tool
            self._user_changes.load_state_dict(state["user_changes"])
        vars(self._callbacks.state).update(self._callbacks.intervals | state.get("intervals", {}))
        restore_schedule(self._parts.schedule, state["schedule"], rates)
        self._learning_rate = state.get("learning_rate", rates[0])  # older checkpoints have no rate of the last step
        vars(self._parts.optimizer.inner).update(state.get("optimizer", {}))
        if state.get("own"):
            self._hooks.load_state(state["own"])
        if self._parts.step.scaler is not None and state.get("loss_scaler") is not None:
            self._parts.step.scaler.load_state_dict(state["loss_scaler"])
        if self._spikes is not None and state.get("spikes") is not None:
            self._spikes.load_state_dict(state["spikes"])

    def take_folder(self, *, resumes: bool) -> None:
        """Checks that the output folder is free for this run, and claims it. Collective.

        Raises UsageError or StepmarkError as `check_start`, and CheckpointBusy where another process has claimed it.
        """
        parts, folder = self._parts, Path(self._args.output_dir)
        goes_on = resumes or set_aside_finished_run(folder, parts.context.host)
        size = check_start(folder, parts.saved, self._args, parts.context, resumes=goes_on)
        self._checkpointer.claim()
        self._snapshots.open(size, resumes=resumes)
        if self._args.save_strategy != "no":
            schedule = schedule_state(parts.schedule) if hasattr(parts.schedule, "state_dict") else parts.schedule
            # What cannot be saved of these is named before training.
            describe({"model": parts.saved, "optimizer": parts.optimizer, "lr_scheduler": schedule})
            self._withdraw_stop_request()

    def restore(self, resume: bool | str | None) -> Path | None:
        """Restores the checkpoint that `resume` names, or with True the newest complete one, or the snapshot after it.
        Returns its path; None where the run begins at its first step. Collective.

        Raises CheckpointError, before anything is trained, where this run cannot continue from any.
        """
        restored = None
        status = RunStatus.read(Path(self._args.output_dir)) if resume else RunStatus()
        self._monitor.spent = TimeSpent(status.content)
        if resume:
            named = Path(resume) if isinstance(resume, str) else self._snapshots.newest(self._parts.identity)
            if named is None:
                restored = newest_of_both(partial(self._restore, None), self._mirror.fetch)
            else:
                restored = self._restore(named)
        self._snapshots.goes_on(None if restored is None else restored.path)
        if self._ends and self._parts.context.host.broadcast(status.state in (None, DONE)):
            self._ends = self._callbacks.out_of_patience()  # else it is to go on, as after a stop at a time limit
        if self._ends:
            logger.warning("a callback has ended the run at step %d; raise max_steps to go on", self._step)
        if restored is not None:
            for message in self._changes.values():
                self._callbacks.run_log.event("accepted", self._step, message=message)
            if not is_in_memory(restored.path):
                self._saved_step = self._step
                self._monitor.restored(restored.path, self._step, restored.quarantined)
        elif not extracting_graphs():
            folder, host = Path(self._args.output_dir), self._parts.context.host
            set_aside_earlier_attempt(folder, host, resumes=bool(resume), repeats=self._record_resumption)
            self._monitor.spent.restored(0.0, 0.0)
        return None if restored is None else restored.path

    def _restore(self, checkpoint: Path | None) -> Restored | None:
        """As `restore_run`. Where the checkpoint is named, the run has left those that are newer."""
        parts, callbacks, began = self._parts, self._callbacks, time.perf_counter()
        restored = restore_run(self.sections(), parts, callbacks, self._checkpointer, checkpoint, self._changes)
        if checkpoint is not None and restored is not None and self._args.save_strategy != "no":
            for path in self._mirror.leave_later(restored.step):
                logger.warning(
                    "%s is newer than %s, from which the run goes on: it is %s now",
                    checkpoint.with_name(path.name.partition("-")[2]),
                    restored.path.name,
                    path.name,
                )
        if restored is not None:
            kept = finite_number(self._checkpointer.metadata(restored.path).get(KEPT))
            self._monitor.spent.restored(time.perf_counter() - began, kept)
        return restored

    # The loop

    def train(self, restored: Path | None) -> dict[str, Any]:
        """Trains to the end of the run, and loads the best model where the arguments ask for it. Collective.

        `restored` is what `restore` returned. Returns the values of train_results.json; they stay where an earlier
        process has ended the run.
        """
        parts, callbacks, first, evaluating = self._parts, self._callbacks, self._step, self._unfinished is not None
        self._monitor.started(parts, first)
        if restored is not None:
            self._record_resumption(restored)
        callbacks.begin(parts.total_steps)
        if restored is not None:
            callbacks.progress.line(f"resumed from {restored} at step {first}")
        began = time.perf_counter()
        with self._user_changes.beginning("on_train_begin"):
            self._seed(0, "on_train_begin")
            callbacks.train_begins()
        with noisy_embeddings(parts.model, self._args.neftune_noise_alpha):
            self._run(restored)
        seconds, steps = time.perf_counter() - began, self._step - first
        ended = {} if steps or evaluating else self._earlier_end()
        # The time since the last log, in which the last evaluation and the last save were.
        machine = {**self._monitor.part_fields(), "target_tokens": self._losses.since_start["tokens"]}
        if self._args.load_best_model_at_end:
            state, folder = callbacks.state, self._checkpointer.folder
            locate_best(state, folder, parts.context.host, "the last model is the final one")
            if state.best_model_checkpoint is not None:
                self._checkpointer.restore_from({"model": parts.saved}, Path(state.best_model_checkpoint))
                callbacks.best_step = state.best_global_step
        metrics = {
            "total_flos": callbacks.state.total_flos,
            "train_loss": self._losses.mean_loss(),
            "train_runtime": seconds,
            "train_samples_per_second": self._samples / seconds,
            "train_steps_per_second": steps / seconds,
        }
        if ended:
            metrics = {name: value for name, value in ended.items() if name not in ("epoch", "step")}
        else:
            callbacks.log(metrics, machine)
        callbacks.event("on_train_end")
        parts.context.host.barrier()  # the run is done where no rank hangs in a callback
        return {"epoch": callbacks.state.epoch, **metrics}

    def _earlier_end(self) -> dict[str, Any]:
        """The last log of an earlier process, if it has ended the run at this step; the history is then that of its
        end. Empty where none has. Collective."""
        path, host, history = Path(self._args.output_dir) / TRAINER_STATE, self._parts.context.host, None
        with contextlib.suppress(OSError, ValueError):
            history = [*read_state(path).log_history] if host.rank == 0 else None
        history = host.broadcast(history)
        ends = [log for log in history or () if "train_loss" in log and log["step"] == self._step]
        if ends:
            self._callbacks.state.log_history = history
        return dict(ends[-1]) if ends else {}

    def _run(self, restored: Path | None) -> None:
        """Trains to the last step, or until a callback stops it; returns when all ranks and all saves are done."""
        for line in banner(self._parts, self._step) if self._callbacks.run_log.writes else ():
            self._callbacks.progress.line(line)
        if self._args.eval_on_start and restored is None:
            self._evaluate()
        self._mirror.start()
        self._monitor.begin()
        self._parts.step.defer_gathers()
        self._finish_step_of_earlier_process()
        if restored is not None and self._args.ignore_data_skip:
            self._parts.loader.begin_epoch()
        self._record_position()
        while (spike := self._train_to_the_end()) is not None:
            self._roll_back(*spike)
        with self._monitor.timers.within("save"):
            self._snapshots.wait()
            self._checkpointer.wait()
        self._monitor.saves.close()
        if self._preemption is not None:  # another rank may still wait for an answer of this one's thread
            self._parts.context.host.barrier()
        enter_phase(END)

    def _train_to_the_end(self) -> tuple[Any, ...] | None:
        """Trains to the last step. Returns the arguments of `_roll_back` where the run goes back before that: the error
        itself would keep a step's batch alive."""
        try:
            if self._step < self._parts.total_steps:
                self._stop_if_asked()
            while self._step < self._parts.total_steps and not self._callbacks.control.should_training_stop:
                with self._user_changes.beginning("on_epoch_begin") if self._epoch_open else contextlib.nullcontext():
                    self._event("on_epoch_begin")
                self._epoch_open = True
                if not self._callbacks.control.should_training_stop:
                    self._train_epoch()
                self._end_epoch()
            self._parts.step.settle()
            self._check_finite()
        except _LossSpike as spike:
            return spike.args
        return None

    def _roll_back(self, first: int, last: int, path: Path) -> None:
        """Returns to the checkpoint from before these spikes, and moves past the samples up to the last of them, as
        PaLM's training did (A. Chowdhery et al., 2022, section 5.1). Collective.

        Raises TrainingDiverged where the run has gone back `max_rollbacks` times.
        """
        callbacks, parts, spikes = self._callbacks, self._parts, self._spikes
        assert spikes is not None
        count, after, attempt = spikes.rollbacks, self._positions[last], callbacks.run_log.attempts()
        parts.optimizer.gathers.wait()
        if count == self._args.max_rollbacks:
            raise TrainingDiverged(
                f"step {first} is a loss spike after {count} rollbacks (max_rollbacks); {path.name} is from before it: "
                "lower learning_rate, look at the samples of these steps with stepmark rows, or raise max_rollbacks"
            )
        self._snapshots.wait()
        callbacks.control = TrainerControl()
        self._monitor.part_fields()  # of the steps that are undone
        self._restore(path)
        self._losses.timed_tokens = 0
        self._monitor.restart()
        self._snapshots.goes_on(path)
        spikes.rollbacks = count + 1
        self._monitor.anomalies.rolled_back()
        self._positions.clear()
        self._saved_step, self._ends = self._step, False
        message = (
            f"steps {self._step + 1} to {last} are undone, and their samples left out: `stepmark rows "
            f"{self._args.output_dir} --step {self._step + 1}-{last} --attempt {attempt}` shows them"
        )
        callbacks.run_log.event("rolled_back", self._step, first=first, last=last, attempt=attempt, message=message)
        callbacks.progress.line(f"rolled back to {path.name}: {message}")
        self._record_resumption(path)
        self._finish_step_of_earlier_process()
        parts.loader.load_state_dict(after)
        self._record_position()

    def _record_position(self) -> None:
        """Records which samples come next, for `stepmark rows`: again wherever they are not those that follow."""
        loader, run_log = self._parts.loader, self._callbacks.run_log
        data = loader.recorded() if isinstance(loader, DataLoader) else {"order": loader.state_dict()["order"]}
        mesh, fingerprint = self._parts.mesh.shape, self._parts.identity["data"]
        run_log.event(POSITION, self._step, attempt=run_log.attempts(), loader=data, mesh=mesh, data=fingerprint)

    def _record_resumption(self, restored: Path | None = None) -> None:
        """Adds to the metrics that the steps after this one appear again."""
        run_log = self._callbacks.run_log
        attempt = run_log.attempts() + 1
        if restored is not None:
            name = "memory" if is_in_memory(restored) else restored.name
            run_log.event("resumed", self._step, checkpoint=name, attempt=attempt)
        self._callbacks.resumed()
        run_log.metrics({"resumed": self._step, "attempt": attempt, "mesh": self._parts.mesh.shape})

    def _finish_step_of_earlier_process(self) -> None:
        """Completes the evaluation in which the run was stopped, and ends an epoch that was left open."""
        self._parts.model.train()  # as after that step: what is logged may ask
        if self._unfinished is not None:
            vars(self._callbacks.control).update(self._unfinished["control"])
            self._callbacks.control.should_evaluate = True  # the callbacks of the first of several sets have unset it
            self._follow_control()
            self._unfinished = None
        control, position = self._callbacks.control, self._parts.loader.state_dict()
        over = position["epoch"] >= self._callbacks.state.num_train_epochs and self._cut_epochs and not self._epoch_open
        control.should_training_stop |= self._ends or over
        self._ends = False
        if self._epoch_open and (not position["samples"] or control.should_training_stop or control.should_epoch_stop):
            self._end_epoch()

    def _event(self, name: str) -> None:
        """Calls callbacks. What these draw, also from generators of their own, and what is called until the next such
        event, is of the seed, the step and the event alone: a resumed run draws it again."""
        self._seed(self._step, name)
        self._callbacks.event(name)

    def _seed(self, step: int, event: str) -> None:
        own = generators_kept_by(*self._callbacks.handler.callbacks)
        seed_generators(self._parts.context.runtime, derive_seed(self._args.seed, step, event), own)

    def _train_epoch(self) -> None:
        show_step(StepPlace(self._step + 1))
        self._parts.loader.announce_epoch()
        with contextlib.closing(iter(DevicePrefetcher(self._parts.loader, self._parts.context.runtime))) as source:
            for batch in self._monitor.timers.waiting(source):
                self._train_step(batch)
                control = self._callbacks.control
                if control.should_training_stop:
                    return
                self._stop_if_asked()
                if control.should_epoch_stop:
                    return

    def _end_epoch(self) -> None:
        self._epoch_open = False
        enter_phase(BETWEEN)
        self._check_targets()
        self._skip_rest_of_epoch()
        state, control = self._callbacks.state, self._callbacks.control
        in_last_epoch = state.epoch is not None and state.epoch > state.num_train_epochs - 1
        if self._cut_epochs and in_last_epoch and not control.should_training_stop:
            end_run(self._args, control)
        self._event("on_epoch_end")
        self._follow_control()

    def _train_step(self, batch: StepBatch) -> None:
        callbacks, parts = self._callbacks, self._parts
        self._user_changes.step_begins()
        self._event("on_step_begin")
        set_training(parts.model, parts.optimizer.inner)
        hooks = StepHooks(
            after_micro_step=callbacks.heard("on_substep_end"),
            before_update=callbacks.heard("on_pre_optimizer_step"),
            after_update=callbacks.heard("on_optimizer_step"),
            updated=partial(advance, parts.schedule, parts.optimizer),
        )
        show_step(StepPlace.of(self._step + 1, batch.samples, batch.state))
        if self._first_step is None:
            self._first_step = self._step
            callbacks.progress.line(f"loss     {parts.step.loss.weighting(batch[0])}")
        self._learning_rate = float(parts.schedule.get_last_lr()[0])
        with self._monitor.within_step(batch):
            statistics = parts.step(self._step, batch, hooks)
            enter_phase(BETWEEN)
            self._losses.add(statistics, self._learning_rate)
        if shows_rates(parts.schedule):
            self._learning_rate = float(parts.schedule.get_last_lr()[0])
        if self._snapshots.due(self._step + 1):  # before it counts: so many are repeated at most
            with self._monitor.timers.within("save"):
                self._snapshots.wait()
        callbacks.state.global_step += 1
        callbacks.state.epoch = batch.epoch
        self._samples += batch.samples
        tokens = self._flos.tokens(batch, len(parts.mesh.ranks.own))
        callbacks.state.total_flos += self._flos.per_token * tokens
        callbacks.state.num_input_tokens_seen += round(tokens)
        if self._args.on_loss_spike == ROLLBACK:
            self._positions[self._step] = batch.state
        self._event("on_step_end")
        self._monitor.step_ended(self._step, batch)
        self._show_progress()
        self._follow_control()
        self._take_snapshot()
        self._checkpointer.check()
        self._mirror.check()
        show_step(StepPlace(self._step + 1))

    def _follow_control(self) -> None:
        """Logs, evaluates and saves, in this order, as the control's flags say."""
        self._skip_rest_of_epoch()
        if self._callbacks.control.should_log:
            self._log()
        if self._callbacks.control.should_evaluate:
            self._callbacks.control.should_evaluate = False  # also where an earlier process has announced it
            self._evaluate()
            self._skip_rest_of_epoch()
        if self._callbacks.control.should_save:  # an evaluation may have set it
            self._save()
            self._stop_if_requested()

    def _skip_rest_of_epoch(self) -> None:
        """Where a callback has ended the epoch early: the next step, here or in a resumed run, is in the next epoch.
        The number of epochs stays the same, also with `max_steps`."""
        position = self._parts.loader.state_dict()
        if self._callbacks.control.should_epoch_stop and position["samples"]:
            self._cut_epochs = True
            self._parts.loader.load_state_dict({**position, "epoch": position["epoch"] + 1, "samples": 0})
            self._record_position()

    # Logs

    def _show_progress(self) -> None:
        values = None
        if self._callbacks.progress.due():
            self._losses.settle()
            counts = {"tokens": self._losses.timed_tokens, "samples": self._monitor.throughput.samples}
            seconds = self._monitor.timers.training()
            speeds = {f"{unit}_per_second": count / seconds for unit, count in counts.items()}
            values = {"loss": self._losses.last_loss, **speeds}
        self._callbacks.progress.step(self._step, values)

    def _log(self) -> None:
        self._check_targets()
        values = self._losses.take_log()
        if values is None:
            self._callbacks.control.should_log = False
            return
        seconds = self._monitor.timers.training()  # of all rates, so that those of samples and tokens may be equal
        speed = self._losses.timed_tokens / seconds
        self._losses.timed_tokens = 0
        loads, tokens = self._losses.take_loads(), self._losses.since_start["tokens"]
        self._monitor.anomalies.loads(self._step, loads)
        over_layers, of_layers = load_fields(loads)
        machine = {**self._monitor.log_fields(seconds), "target_tokens": tokens, **of_layers}
        log = {**values, "learning_rate": self._learning_rate, "tokens_per_second": speed, **over_layers}
        if self._args.include_num_input_tokens_seen != "no":
            log["num_input_tokens_seen"] = self._callbacks.state.num_input_tokens_seen
        counters = self._parts.context.runtime.counters()
        if counters is not None:
            log |= {"graph_compilations": counters.compilations}
            log |= {} if counters.executions is None else {"graph_executions": counters.executions}
        cache = self._parts.context.runtime.cache_counters()
        if cache is not None:
            log |= {"graph_cache_hits": cache.hits, "graph_cache_misses": cache.misses}
        self._callbacks.progress.step(self._step, {"epoch": self._callbacks.state.epoch, **log, **machine})
        self._callbacks.log(log, machine)
        self._callbacks.control.should_log = False
        self._check_finite()

    def _check_finite(self) -> None:
        """Raises TrainingDiverged where the run has, on all ranks: they see the same numbers where all read them."""
        self._losses.settle()
        self._check_spikes()
        state, control = self._callbacks.state, self._callbacks.control
        loads_best = self._args.load_best_model_at_end and state.best_model_checkpoint is not None
        at_end = self._step >= self._parts.total_steps or control.should_training_stop
        error = self._monitor.anomalies.diverged(ended=at_end and not loads_best)
        if error is not None:
            self._checkpointer.wait()
            self._monitor.saves.close()
            raise TrainingDiverged(self._parts.context.host.broadcast(error))

    def _check_spikes(self) -> None:
        """Raises _LossSpike on all ranks where the run is to go back, and can: to the newest checkpoint from before."""
        if self._spikes is None or self._args.on_loss_spike != ROLLBACK:
            return
        if self._spikes.found is not None:
            first, last = self._spikes.found
            self._checkpointer.wait()
            folder = self._checkpointer.folder
            saved = [each for path in checkpoints(folder) if (each := step_of(path)) and each < first]
            newest = self._parts.context.host.broadcast(max(saved, default=None))
            if newest is not None:
                raise _LossSpike(first, last, checkpoint_path(folder, newest))
            self._monitor.not_rolled_back(first)
        self._positions.clear()

    def _check_targets(self) -> None:
        """Warns if no label was a target yet, and after an epoch, or many steps, raises DataError; on all ranks."""
        if self._first_step is None or extracting_graphs() or self._losses.any_targets():
            return
        message = (
            f"train_dataset: no label was a target up to step {self._step}: all are "
            f"{self._parts.step.loss.labels.ignored}, which the loss ignores; check how labels are masked or "
            "truncated, or set loss_averages_over for a loss without labels"
        )
        ended = self._step >= self._parts.total_steps or not self._parts.loader.state_dict()["samples"]
        if ended or self._step - self._first_step >= MAX_STEPS_WITHOUT_TARGETS:
            raise DataError(message)
        if self._callbacks.run_log.writes:
            logger.warning("%s", message)

    # Evaluations

    def _evaluate(self) -> None:
        """Runs an evaluation that the strategy asked for; the best metric and the schedule may follow it. One in which
        an earlier process was stopped continues where it was."""
        self._check_finite()
        metrics = self._pausable_evaluation()
        self._unfinished = None
        key, state = self._args.best_metric_key, self._callbacks.state
        if key is None:
            return
        if key not in metrics:
            names = ", ".join(sorted(name for name in metrics if name != "epoch"))
            raise UsageError(f"metric_for_best_model: {key} is not found in the evaluation metrics, which are {names}")
        if not isinstance(metrics[key], (int, float)):
            raise UsageError(f"metric_for_best_model: {key} is a {type(metrics[key]).__name__}; name a number")
        if follows_metric(self._parts.schedule):
            self._parts.schedule.step(metrics[key])
        if state.best_metric is None:  # from now on EarlyStoppingCallback counts, also where the metric is nan
            state.best_metric = float("-inf" if self._args.greater_is_better else "inf")
        if not self._monitor.anomalies.not_finite and is_better(self._args, metrics[key], state.best_metric):
            state.best_metric, state.best_global_step = metrics[key], state.global_step
            saves_best = self._args.save_strategy == "best" or self._args.load_best_model_at_end
            if self._saved_step == self._step:  # before it was evaluated: nothing in its checkpoint keeps it
                self._saved_step, saves_best = -1, True
            self._callbacks.control.should_save |= saves_best

    def _pausable_evaluation(self) -> dict[str, float]:
        """An evaluation that a signal can stop; sets that an earlier process completed are not evaluated again."""
        earlier = {} if self._unfinished is None else self._unfinished["evaluated"]
        may_continue = (lambda: True) if self._preemption is None else self._preemption.may_continue
        evaluation = EvaluationProgress(may_continue, earlier)
        self._parts.optimizer.switch("eval")  # where a callback has changed that
        try:
            with self._monitor.within("evaluation", self._step):
                return self._hooks.evaluate(evaluation)
        except EvaluationPaused:
            assert self._preemption is not None
            self._postpone(evaluation)
            self._stop(self._preemption, "in the evaluation ")
        except Exception:
            # What was trained is not lost, where all ranks are here: a single one, or those whose metrics failed.
            all_here = evaluation.metrics_failed or self._parts.context.host.size == 1
            if all_here and self._callbacks.control.should_save:
                self._postpone(evaluation)
                self._save()
                self._checkpointer.wait()
            raise

    def _postpone(self, evaluation: EvaluationProgress) -> None:
        """Keeps what is left to do after this step, for the resumed run."""
        control = {flag: getattr(self._callbacks.control, flag) for flag in FLAGS_AFTER_EVALUATION}
        completed = self._parts.context.host.broadcast(evaluation.completed)  # each rank has its own runtimes in it
        unfinished = {"control": control, "evaluated": completed}
        if unfinished != self._unfinished and self._step:
            self._unfinished, self._saved_step = unfinished, -1

    # Saves

    def _save(self) -> None:
        if extracting_graphs():
            warn_not_saved(f"checkpoint-{self._step}")
            self._callbacks.control.should_save = False
            return
        self._parts.step.settle()
        self._check_finite()
        self._check_targets()
        with self._monitor.within("save", self._step), self._mirror.holding():
            self._hooks.save(self._begin_save, self._checkpointer.wait)
            self._callbacks.progress.line(f"{'saving' if self._args.async_save else 'saved'} checkpoint-{self._step}")
            if heard := self._callbacks.hears("on_save"):
                self._checkpointer.wait()
                self._checkpointer.complete(self._step)  # a callback may read the checkpoint, or add files to it
            with self._user_changes.watching(WRITTEN, settings=True) if heard else contextlib.nullcontext():
                self._callbacks.event("on_save")
            self._user_changes.check()

    def _begin_save(self) -> None:
        state, model_only, key = self._callbacks.state, self._args.save_only_model, self._args.best_metric_key
        evaluated_at, metrics = self._callbacks.last_evaluation or (-1, {})
        best = {key: metrics[key]} if key is not None and evaluated_at == self._step and key in metrics else {}
        if state.best_global_step == self._step:
            state.best_model_checkpoint = str(checkpoint_path(self._checkpointer.folder, self._step))
        self._parts.optimizer.switch("eval")
        self._hooks.collect_files()
        self._snapshots.wait()  # else there would be two copies in the host's memory
        handle = self._checkpointer.save(
            self._step,
            {"model": self._parts.saved} if model_only else self.sections(),
            files=self._hooks.write_files,
            metadata=self._metadata(),
            model_only=model_only,
            metrics={**best, **self._monitor.anomalies.not_finite},
        )
        self._saved_step = self._step
        self._snapshots.saves(handle)
        self._monitor.save_begun(handle)
        if self._preemption is not None:
            self._preemption.saves.append(handle)

    def _metadata(self) -> dict[str, Any]:
        """What a checkpoint says of the run, beside its state."""
        return {
            "identity": self._parts.identity,
            "data": self._parts.data,
            EVALUATION: None if self._parts.evaluation is None else asdict(self._parts.evaluation),
            "model_only": self._args.save_only_model,
            "samples_per_step": self._parts.loader.layout.global_batch,
            FIELD: None if self._parts.mesh.needs_processes else self._parts.mesh.ranks.total,
            ARITHMETIC: arithmetic_of(self._parts.mesh),
            KEPT: self._monitor.kept_seconds(),
        }

    def _take_snapshot(self) -> None:
        """Where one is due. For callbacks, logs and the mirror it is no save."""
        if self._snapshots.due(self._step):
            self._parts.step.settle()
            self._check_finite()
            with self._monitor.within("save", self._step):
                best, write_files = self._callbacks.state.best_global_step, self._hooks.write_state
                self._snapshots.take(self._step, self.sections(), write_files, self._metadata(), best)

    # Signals, and requests to stop

    @contextlib.contextmanager
    def recording_end(self) -> Iterator[None]:
        """Inside the block, what ends the run before its end is recorded. After it, the step is closed."""
        try:
            yield
        except BaseException as error:
            record_end(self._callbacks, error, self._parts.context.host)
            raise
        finally:
            self._parts.step.close()
            self._callbacks.close()

    @contextlib.contextmanager
    def stopping_at_signals(self) -> Iterator[None]:
        """Inside the block, a signal stops the run, as `save_on_signal` says."""
        if not self._args.save_on_signal:
            yield
            return
        announce = self._announce_stop, partial(record_stop, self._callbacks)
        with PreemptionCoordinator(self._parts.context, self._args.signal_grace, *announce) as self._preemption:
            try:
                yield
            except Exception as error:
                if self._preemption.explains(error):
                    ended = str(error).partition(";")[0] if isinstance(error, PeerLost) else "another rank has ended"
                    reason = f"{self._preemption.signal_name}: {ended}; the last checkpoint stands"
                    raise RunInterrupted(reason) from error
                raise

    def _announce_stop(self, reason: str) -> None:
        more = "; press Ctrl-C again to end at once, without a checkpoint" if reason.startswith("SIGINT") else ""
        if self._callbacks.run_log.writes:
            say(f"interrupted by {reason}{more}")
        self._callbacks.run_log.stopping(self._step, reason)

    def _stop_if_asked(self) -> None:
        """Before a step: where the run is to stop here, saves what is not saved, and raises RunInterrupted."""
        if self._preemption is not None and not self._preemption.may_continue():
            self._stop(self._preemption)

    def _stop(self, preemption: PreemptionCoordinator, where: str = "") -> NoReturn:
        self._parts.optimizer.gathers.wait()
        saves = self._step != self._saved_step
        if saves:
            self._parts.context.runtime.step_boundary(wait=True)
        in_time = not saves or preemption.may_save()
        if saves and in_time:
            self._save()
        with self._monitor.timers.within("save"):
            self._checkpointer.wait()
        self._monitor.saves.close()
        if not in_time:
            raise RunInterrupted(f"{preemption.signal_name}: there was no time for a save; the last checkpoint stands")
        saved = f"checkpoint-{self._step} is saved" if self._step else "nothing was trained yet"
        if extracting_graphs():
            saved = "nothing is saved"
        if self._mirror.url is not None and self._step:
            behind = self._mirror.finish(preemption.seconds_left())
            saved += f"; {behind}" if behind else f" and in {self._mirror.url}"
        raise RunInterrupted(f"{preemption.signal_name}: stopped {where}after step {self._step}, {saved}")

    def _withdraw_stop_request(self) -> None:
        """Removes a request to stop: one made to an earlier run, or one that this run has followed."""
        if self._parts.context.host.rank == 0 and not extracting_graphs():
            files.remove_file(self._checkpointer.folder / STOP_REQUEST)

    def _stop_if_requested(self) -> None:
        """After a save: where the run was asked from outside to stop, it ends here, on all ranks."""
        if extracting_graphs():  # the request is for the run that trains
            return
        host = self._parts.context.host
        reason = host.broadcast(reason_to_stop(self._checkpointer.folder) if host.rank == 0 else None)
        if reason is None or self._step >= self._parts.total_steps:
            return
        self.stop_reason = f"stopped after step {self._step}: {reason}"
        self._callbacks.progress.line(self.stop_reason)
        self._callbacks.control.should_training_stop = True
        self._withdraw_stop_request()
