"""One call of `Trainer.train`: its loader, optimizer, schedule and counts, and the loop over them."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from transformers.trainer_callback import ExportableState, TrainerState

from stepmark.checkpoint import Checkpointer, Manifest, SaveHandle
from stepmark.checkpoint.format.directory import checkpoint_path, checkpoints, resolve_link, step_of
from stepmark.checkpoint.format.manifest import MANIFEST
from stepmark.data.batch import StepBatch
from stepmark.data.prefetcher import DevicePrefetcher
from stepmark.errors import CheckpointDamaged, CheckpointMismatch, CheckpointNotFound, UsageError
from stepmark.runtime.xla_environment import extracting_graphs
from stepmark.trainer.interruption.pausable_evaluation import EvaluationPaused, PausableEvaluation
from stepmark.trainer.interruption.preemption import PreemptionCoordinator, RunInterrupted, preemption_coordinator
from stepmark.trainer.interruption.stop_request import reason_to_stop, withdraw
from stepmark.trainer.run_identity import check_same_run
from stepmark.trainer.strategies import is_better
from stepmark.trainer.telemetry.loss_meter import LossMeter
from stepmark.trainer.telemetry.monitor import Monitor
from stepmark.trainer.telemetry.progress import ProgressDisplay
from stepmark.training.schedule import advance, follows_metric, restore_schedule, schedule_state
from stepmark.training.step import StepHooks

if TYPE_CHECKING:
    from stepmark.trainer.trainer import Trainer

LEFT_TO_DO = ("should_save", "should_epoch_stop", "should_training_stop")  # once a step is trained

logger = logging.getLogger("stepmark")


class TrainingLoop:
    """The state of a run and the loop that moves it. All that a resumed run needs is in `sections`."""

    def __init__(self, trainer: Trainer, checkpointer: Checkpointer) -> None:
        self.trainer = trainer
        self.args = trainer.args
        self.checkpointer = checkpointer
        self.loader = trainer.train_loader()
        self.total_steps = self._count_steps()
        self.optimizer = trainer.make_optimizer()
        self.schedule = trainer.make_schedule(self.optimizer, self.total_steps)
        self.step = trainer.make_step(self.optimizer)
        self.monitor = Monitor.of(trainer)
        self.means = LossMeter(trainer.context.runtime, self.monitor.look)
        self.identity = trainer.identity()
        self._loader_state: dict[str, Any] = self.loader.state_dict()
        self._epoch_open = False
        self._unfinished: dict[str, Any] | None = None  # what is left of an evaluation in which the run was stopped
        self._stopper: PreemptionCoordinator | None = None
        self._saved_step = 0  # 0: there is nothing to save yet
        self.asked_to_stop: str | None = None  # why, where somebody outside has asked

    def _count_steps(self) -> int:
        if self.args.max_steps > 0:
            return self.args.max_steps
        return math.ceil(self.args.num_train_epochs * self.loader.steps_per_epoch)

    # What is saved and restored

    def sections(self) -> dict[str, Any]:
        """What a checkpoint of this run holds, for `Checkpointer.save` and `Checkpointer.restore`."""
        return {"model": self.trainer.model, "optimizer": self.optimizer, "run": self}

    def state_dict(self) -> dict[str, Any]:
        """Everything but tensors, as plain values."""
        return {
            "step": self.trainer.state.global_step,
            "epoch": self.trainer.state.epoch,
            "epoch_open": self._epoch_open,
            "loader": self._loader_state,
            "unfinished": self._unfinished,
            "means": self.means.state_dict(),
            "schedule": schedule_state(self.schedule),
            "rates": [float(group["lr"]) for group in self.optimizer.inner.param_groups],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trainer.state.global_step = state["step"]
        self.trainer.state.epoch = state["epoch"]
        self._epoch_open = state["epoch_open"]
        self._unfinished = state.get("unfinished")
        self._loader_state = state["loader"]
        self.loader.load_state_dict(state["loader"])
        self.means.load_state_dict(state["means"])
        restore_schedule(self.schedule, state["schedule"], state["rates"])

    def resume(self, checkpoint: Path | None) -> Path | None:
        """Restores `checkpoint`, or the newest whole one (None where there is none at all). Returns what was restored.

        Raises CheckpointError, before anything is trained, where there is nothing that this run can go on from.
        """
        folder = self.checkpointer.folder
        if checkpoint is None and not self.trainer.context.host.broadcast(bool(checkpoints(folder))):
            return None
        if checkpoint is not None:
            checkpoint = resolve_link(checkpoint)
            _check_named(checkpoint)
        self.optimizer.ensure_state()
        try:
            step = self.checkpointer.restore(self.sections(), checkpoint, accept=self._accept)
        except CheckpointDamaged as error:
            remedy = "" if checkpoint is None else "; name another checkpoint, or true for the newest that is whole"
            raise CheckpointDamaged(f"resume_from_checkpoint: {error}{remedy}") from error
        assert step is not None
        path = checkpoint or checkpoint_path(folder, step)
        self._saved_step = step
        self._restore_trainer_state(path)
        self.monitor.restored(path, step, self.checkpointer.set_aside)
        if self.trainer.is_world_process_zero():
            _tell_later(path, step, folder)
        return path

    def _accept(self, path: Path, manifest: Manifest) -> None:
        """Raises CheckpointMismatch for a checkpoint that is not one of this run."""
        if manifest.model_only:
            raise CheckpointMismatch(
                f"resume_from_checkpoint: {path} holds the model alone (save_only_model); start a new run with "
                "model_name_or_path set to it"
            )
        saved = self.checkpointer.metadata(path).get("identity")
        if saved is None:
            raise CheckpointMismatch(
                f"resume_from_checkpoint: {path} was not saved by a training run of Stepmark's; name one that was"
            )
        check_same_run(saved, self.identity, str(path))

    def _restore_trainer_state(self, path: Path) -> None:
        saved = TrainerState.load_from_json(str(path / "trainer_state.json"))
        state = self.trainer.state
        for name in ("log_history", "best_metric", "best_global_step", "best_model_checkpoint"):
            setattr(state, name, getattr(saved, name))
        stateful = [cb for cb in self.trainer.callback_handler.callbacks if isinstance(cb, ExportableState)]
        for callback in stateful:
            values = saved.stateful_callbacks.get(type(callback).__name__)
            if values is not None:
                for name, value in values["attributes"].items():
                    setattr(callback, name, value)

    # The loop

    def loop(self, display: ProgressDisplay) -> None:
        """Trains to the last step, or until a callback stops it. Ends epochs that a killed run left open."""
        self.display = display
        self.monitor.begin()
        trainer = self.trainer
        if self._unfinished is not None:
            self._take_up(self._unfinished)
        control = trainer.control
        over = self._loader_state["samples"] == 0 or control.should_training_stop or control.should_epoch_stop
        if self._epoch_open and over:
            self._end_epoch()
        if trainer.state.global_step < self.total_steps:
            self._stop_if_asked()
        while trainer.state.global_step < self.total_steps and not trainer.control.should_training_stop:
            trainer.event("on_epoch_begin")
            self._epoch_open = True
            self._epoch()
            self._end_epoch()

    def _epoch(self) -> None:
        feed = DevicePrefetcher(self.loader, self.trainer.context.runtime)
        with contextlib.closing(iter(feed)) as batches:
            for batch in self.monitor.clock.waiting(batches):
                self._one_step(batch)
                control = self.trainer.control
                if control.should_training_stop:
                    return
                self._stop_if_asked()
                if control.should_epoch_stop:
                    return

    def _end_epoch(self) -> None:
        self._epoch_open = False
        self.trainer.event("on_epoch_end")
        self._follow_control()

    def _one_step(self, batch: StepBatch) -> None:
        trainer = self.trainer
        trainer.event("on_step_begin")
        hooks = StepHooks(
            after_micro_step=lambda: trainer.event("on_substep_end"),
            before_update=lambda: trainer.event("on_pre_optimizer_step"),
            after_update=lambda: trainer.event("on_optimizer_step"),
        )
        self.monitor.step_begins(trainer.state.global_step + 1, batch, float(self.schedule.get_last_lr()[0]))
        with self.monitor.within_step():
            self.means.add(self.step(trainer.state.global_step, batch, hooks))
        advance(self.schedule)
        if self._stopper is not None:
            self._stopper.step_ended()
        trainer.state.global_step += 1
        trainer.state.epoch = batch.epoch
        self._loader_state = batch.state
        self._show_progress()
        trainer.event("on_step_end")
        self.monitor.step_ended(trainer.state.global_step, batch)
        self._follow_control()
        self.checkpointer.check()

    # Signals

    @contextlib.contextmanager
    def stopping_at_signals(self) -> Iterator[None]:
        """In it, a signal stops the run, as `save_on_signal` says."""
        if not self.args.save_on_signal:
            yield
            return
        with preemption_coordinator(self.trainer) as self._stopper:
            try:
                yield
            except Exception as error:
                if self._stopper.explains(error):
                    reason = f"{self._stopper.signal}: another rank has ended; the last checkpoint stands"
                    raise RunInterrupted(reason) from error
                raise

    def _stop_if_asked(self) -> None:
        """Before a step: where the run is to stop here, saves what is not saved, and raises RunInterrupted."""
        if self._stopper is not None and not self._stopper.may_begin_step():
            self._stop(self._stopper)

    def _stop(self, stopper: PreemptionCoordinator, where: str = "") -> NoReturn:
        step = self.trainer.state.global_step
        if step != self._saved_step:
            self.trainer.context.runtime.step_boundary(wait=True)
            if not stopper.may_save():
                stopper.wait_for_end()
            self._save()
        self.checkpointer.wait()
        self.monitor.close()
        saved = "nothing was trained yet" if not step else f"checkpoint-{step} is saved"
        if extracting_graphs():
            saved = "nothing is saved"
        raise RunInterrupted(f"{stopper.signal}: stopped {where}after step {step}, {saved}")

    def _save(self) -> None:
        pacing = contextlib.nullcontext() if self._stopper is None else self._stopper.pace.within_save()
        with self.monitor.within("save", self.trainer.state.global_step), pacing:
            self.trainer.save_checkpoint(self)

    def note_save(self, handle: SaveHandle | None) -> None:
        """A checkpoint of the present step has been begun."""
        self._saved_step = self.trainer.state.global_step
        if handle is None:
            return
        self.monitor.save_begun(handle)
        if self._stopper is not None:
            self._stopper.pace.add_save(handle)

    def end(self) -> None:
        """Returns when all ranks have trained the last step, and all saves are on disk."""
        self.checkpointer.wait()
        self.monitor.close()
        if self._stopper is not None:  # one that waits for the others' answer must get it
            self.trainer.context.host.barrier()

    def _show_progress(self) -> None:
        step = self.trainer.state.global_step
        if not self.display.due():
            self.display.step(step)
            return
        self.means.settle()
        self.display.step(step, self.means.last_loss, self.means.timed_tokens / self.monitor.clock.training())

    def _follow_control(self) -> None:
        """Logs, evaluates and saves, in this order, as the control's flags say."""
        trainer = self.trainer
        if trainer.control.should_log:
            self._log()
        if trainer.control.should_evaluate:
            self.evaluate()
        if trainer.control.should_save:  # an evaluation may have asked for it
            self._save()
            self._heed_request()

    def evaluate(self) -> None:
        """An evaluation that the run's strategy asked for: the best metric and a schedule may follow it. One that was
        stopped goes on where it was."""
        trainer, state = self.trainer, self.trainer.state
        with self._pausable():
            metrics = trainer.evaluate()
        self._unfinished = None
        key = self.args.best_metric_key
        if key is None:
            return
        if key not in metrics:
            raise UsageError(f"metric_for_best_model: the evaluation has no {key}; it has {', '.join(sorted(metrics))}")
        if follows_metric(self.schedule):
            self.schedule.step(metrics[key])
        if is_better(self.args, metrics[key], state.best_metric):
            state.best_metric, state.best_global_step = metrics[key], state.global_step
            trainer.control.should_save |= self.args.save_strategy == "best" or self.args.load_best_model_at_end

    @contextlib.contextmanager
    def _pausable(self) -> Iterator[None]:
        """In it, the trainer's evaluation can be stopped by a signal, and what an earlier process had found of it is
        not evaluated again."""
        stopper = self._stopper
        may_go_on = (lambda: True) if stopper is None else stopper.may_go_on
        earlier = {} if self._unfinished is None else self._unfinished["evaluated"]
        pausing = self.trainer.pausing = PausableEvaluation(may_go_on, earlier)
        try:
            with self.monitor.within("evaluation", self.trainer.state.global_step):
                yield
        except EvaluationPaused:
            assert stopper is not None
            self._put_off(pausing)
            self._stop(stopper, "in the evaluation ")
        finally:
            self.trainer.pausing = None

    def _put_off(self, pausing: PausableEvaluation) -> None:
        """Keeps what is left to do after this step, for the run that is resumed."""
        control = {flag: getattr(self.trainer.control, flag) for flag in LEFT_TO_DO}
        found = self.trainer.context.host.broadcast(pausing.found)  # each rank has its own seconds in it
        unfinished = {"control": control, "evaluated": found}
        if unfinished != self._unfinished and self.trainer.state.global_step:
            self._unfinished, self._saved_step = unfinished, -1

    def _take_up(self, unfinished: dict[str, Any]) -> None:
        """Does what the run that was stopped in an evaluation had left to do after its last step."""
        for flag, value in unfinished["control"].items():
            setattr(self.trainer.control, flag, value)
        self.trainer.control.should_evaluate = True  # which the callbacks of the first of several sets have unset
        self._follow_control()
        self._unfinished = None

    # Requests from outside

    def forget_request(self) -> None:
        """Before training: what was asked of an earlier run is not asked of this one."""
        if self.trainer.is_world_process_zero() and not extracting_graphs():
            withdraw(self.checkpointer.folder)

    def _heed_request(self) -> None:
        """Behind a save: where somebody has asked the run to stop, it ends here, on all ranks."""
        if extracting_graphs():  # the request is for the run that trains
            return
        host = self.trainer.context.host
        asked = host.broadcast(reason_to_stop(self.checkpointer.folder) if host.rank == 0 else None)
        if asked is None or self.trainer.state.global_step >= self.total_steps:
            return
        self.asked_to_stop = f"stopped after step {self.trainer.state.global_step}: {asked}"
        self.display.line(self.asked_to_stop)
        self.trainer.control.should_training_stop = True
        self.forget_request()

    def _log(self) -> None:
        values = self.means.take_log()
        if values is None:
            self.trainer.control.should_log = False
            return
        speed = self.means.timed_tokens / self.monitor.clock.training()
        self.means.timed_tokens = 0
        machine = self.monitor.log_fields()
        log = {**values, "learning_rate": float(self.schedule.get_last_lr()[0]), "tokens_per_second": speed}
        counters = self.trainer.context.runtime.counters()
        if counters is not None:
            log |= {"graph_compilations": counters.compilations, "graph_executions": counters.executions}
        self.display.step(self.trainer.state.global_step, log["loss"], speed)
        self.trainer.log(log, machine)


def _tell_later(path: Path, step: int, folder: Path) -> None:
    """Warns where the run goes back to before what it has saved: the highest step stays the newest."""
    later = [other.name for other in checkpoints(folder) if (step_of(other) or 0) > step]
    if later:
        logger.warning(
            "going on from %s, and %s has later ones (%s): until this run has passed them, a resumption that names no "
            "checkpoint takes %s; move them away to leave them behind",
            path,
            folder,
            ", ".join(later[:3]) + (", …" if len(later) > 3 else ""),
            later[0],
        )


def _check_named(checkpoint: Path) -> None:
    """Raises CheckpointNotFound where the path that the user gave is no checkpoint."""
    if not checkpoint.exists():
        raise CheckpointNotFound(
            f"resume_from_checkpoint: there is no {checkpoint}; name a checkpoint-N folder, or true for the newest"
        )
    if not (checkpoint / MANIFEST).is_file():
        raise CheckpointNotFound(
            f"resume_from_checkpoint: {checkpoint} is not a checkpoint of Stepmark's: it has no {MANIFEST}; name a "
            "checkpoint-N folder, or true for the newest"
        )
