"""What the Trainer's methods return, and a one-line summary of an evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stepmark.errors import StepmarkError
from stepmark.filesystem.error_advice import with_advice
from stepmark.liveness.host_group import HostGroup
from stepmark.trainer.run_folder.run_log import RunLog


class TrainOutput(NamedTuple):
    """What `Trainer.train` returns, as transformers' does."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class PredictionOutput(NamedTuple):
    """What `Trainer.predict` returns, as transformers' does: numpy arrays of all samples, in their order."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]


class EvalLoopOutput(NamedTuple):
    """What `Trainer.evaluation_loop` returns, as transformers' does: numpy arrays of all samples, in their order."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]
    num_samples: int


Metrics = dict[str, float]


class RunResults:
    """Writes the results of a run to its folder, on rank 0."""

    def __init__(self, folder: Path, run_log: RunLog, host: HostGroup) -> None:
        self._folder = folder
        self._run_log = run_log
        self._host = host

    def write_training(self, metrics: Metrics, steps: int, dataset: Any) -> Metrics:
        """Writes the results of training, and returns them. A process that found the run finished, and trained no
        step, keeps the results of the one that finished it. Collective."""
        if not steps:
            earlier = self._host.broadcast(self._run_log.read_results("train"))
            if earlier is not None and earlier.get("epoch") == metrics["epoch"]:
                return {name: earlier[name] for name in metrics if name in earlier}
        with self.writing():
            self._run_log.results("train", {**metrics, **_count("train_samples", [dataset])})
        return metrics

    def write_evaluation(self, metrics: Metrics, datasets: Sequence[Any]) -> None:
        """Writes the results of evaluating the model that the folder holds."""
        with self.writing():
            self._run_log.results("eval", {**metrics, **_count("eval_samples", datasets)})

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Inside the block, a file that cannot be written is a StepmarkError."""
        try:
            yield
        except OSError as error:
            reason = f"the results cannot be written to {self._folder}: {error.strerror or error}"
            raise StepmarkError(
                f"{with_advice(reason, error)}; then start the run again, with resume_from_checkpoint: true from its "
                "last checkpoint"
            ) from error


def _count(name: str, datasets: Sequence[Any]) -> dict[str, int]:
    """The number of samples, where all datasets have one."""
    counted = all(hasattr(dataset, "__len__") for dataset in datasets)
    return {name: sum(len(dataset) for dataset in datasets)} if counted else {}
