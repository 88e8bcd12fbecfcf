"""What a run asks of its Trainer: the methods that a subclass may override are called from here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from stepmark.checkpoint.format.checkpoint_folders import checkpoint_path
from stepmark.errors import UsageError
from stepmark.filesystem.files import replace_file
from stepmark.trainer.evaluation import EvaluationProgress
from stepmark.trainer.run_folder.run_log import TRAINER_STATE
from stepmark.training.micro_batches import Passes

Action = Callable[[], None]


class RunHooks:
    """What the loop, a step and an evaluation call of a Trainer.

    Where transformers lets a subclass stand around something, such as a save, that is kept here until the subclass
    calls the Trainer's own method. `evaluation` is that of the run, while one is in progress.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._passes: Passes | None = None  # of the micro-batch whose `training_step` is called
        self._save: tuple[Action, Action] | None = None  # what begins the save in progress, and waits for it
        self.evaluation: EvaluationProgress | None = None

    # A step

    def around_passes(self, inputs: Any, items: Tensor, passes: Passes) -> Tensor:
        """Calls a subclass's `training_step`; see `TrainStep`."""
        self._passes = passes
        trainer, given = self._trainer, dict(inputs) if isinstance(inputs, Mapping) else inputs
        loss = trainer.training_step(trainer.model, given, num_items_in_batch=items)
        if self._passes is not None or not isinstance(loss, Tensor):
            raise UsageError(
                f"{type(trainer).__name__}.training_step: it has to call super().training_step, which runs the passes "
                "and weights the loss, and to return what that returns; override compute_loss for a loss of your own"
            )
        return loss.detach().reshape(())

    def run_passes(self, inputs: Any) -> Tensor:
        """What the Trainer's own `training_step` does, once for each micro-batch."""
        passes, self._passes = self._passes, None
        if passes is None:
            raise UsageError("training_step: runs a micro-batch of train(); call it from an override, once")
        return passes(inputs)

    # Evaluations

    def evaluate(self, evaluation: EvaluationProgress) -> dict[str, float]:
        """Evaluates the Trainer's own data, and writes samples of text. Collective."""
        trainer, callbacks = self._trainer, self._trainer._callbacks
        with self.evaluating(evaluation):
            metrics = trainer.evaluate(**trainer._eval_options)
        callbacks.last_evaluation = (callbacks.state.global_step, metrics)
        for each in trainer.evaluation.sample_texts():
            callbacks.sampled(*each)
        return metrics

    @contextmanager
    def evaluating(self, evaluation: EvaluationProgress) -> Iterator[None]:
        """Inside the block this is the evaluation in progress, whatever a user's `evaluate` calls."""
        before, self.evaluation = self.evaluation, evaluation
        try:
            yield
        finally:
            self.evaluation = before

    def predict(
        self, inputs: Any, loss_only: bool, ignore_keys: Sequence[str] | None
    ) -> tuple[Tensor | None, Any, Any]:
        given = dict(inputs) if isinstance(inputs, Mapping) else inputs
        return self._trainer.prediction_step(self._trainer.model, given, loss_only, ignore_keys)

    # Saves

    def save(self, begin: Action, wait: Action) -> None:
        """Begins a save, inside a subclass's `_save_checkpoint`, if any. `wait` ends when it is on disk. Collective."""
        trainer = self._trainer
        if not trainer._overridden("_save_checkpoint"):
            begin()
            return
        self._save = begin, wait
        trainer._save_checkpoint(trainer.model, None)
        if self._save is not None:  # the subclass has written its own files, and not called the Trainer's method
            self._save = None
            trainer.context.host.barrier()
            if trainer.is_world_process_zero():
                trainer._saved.take(checkpoint_path(Path(trainer.args.output_dir), trainer.state.global_step))
            begin()

    def save_now(self) -> None:
        """What the Trainer's own `_save_checkpoint` does; waits where the caller is of a user's."""
        pending, self._save = self._save, None
        if pending is None:
            raise UsageError("_save_checkpoint: training calls it; set control.should_save in a callback to save")
        begin, wait = pending
        begin()
        method: Any = self._trainer._save_checkpoint
        module = getattr(method, "__func__", method).__module__
        if module.partition(".")[0] != getattr(type(self._trainer), "_library", None):
            wait()

    def collect_files(self) -> None:
        """Before a save: an overridden `save_model` or `_save` writes files that the checkpoint gets. Collective."""
        trainer = self._trainer
        if trainer._overridden("save_model") or trainer._overridden("_save"):
            trainer._saved.collect(trainer.save_model)

    def write_files(self, folder: Path) -> Action:
        """Adds a run's files to a checkpoint's folder, on rank 0. Returns what completes them later."""
        trainer = self._trainer
        trainer._saved.add_to(folder, trainer._saved_processing)
        for write in trainer.checkpoint_files:
            write(folder)
        return self.write_state(folder)

    def write_state(self, folder: Path) -> Action:
        """Of these files, what a run needs that goes on."""
        path, content = folder / TRAINER_STATE, self._trainer._callbacks.encode_state()
        replace_file(path, b"")
        return partial(replace_file, path, content)

    def state(self) -> dict[str, Any]:
        """A subclass's part of the run's state."""
        return self._trainer._complete_run_state()

    def load_state(self, state: dict[str, Any]) -> None:
        self._trainer._load_complete_run_state(state)
