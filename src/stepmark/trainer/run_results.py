"""What a run leaves of its results: train_results.json, eval_results.json, and how it ended."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stepmark.errors import StepmarkError
from stepmark.filesystem.error_advice import with_advice
from stepmark.launch.restarts import may_be_restarted
from stepmark.launch.signal_listener import HOW_TO_GO_ON, RunInterrupted
from stepmark.launch.world import World
from stepmark.liveness.failure_report import REPORTS, FailureReport, keep_failure
from stepmark.liveness.host_group import HostGroup
from stepmark.liveness.process_exit import say
from stepmark.trainer.callbacks import RunCallbacks
from stepmark.trainer.run_folder.run_log import RunLog

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


def record_end(callbacks: RunCallbacks, error: BaseException, host: HostGroup) -> None:
    """Records in the run's status that it did not reach its end; a status that cannot be written hides no error. Where
    rank 0 was killed, and no supervisor knows, the first rank that is left does so."""
    run_log, step = callbacks.run_log, callbacks.state.global_step
    if host.rank and REPORTS not in os.environ and all(map(host.is_gone, range(host.rank))):
        run_log.writes = run_log.recorded_state() == "running"
    if isinstance(error, RunInterrupted) and error.recorded:
        return
    if isinstance(error, RunInterrupted):
        run_log.try_status("interrupted", step, error.reason)
        if run_log.writes:
            say(f"interrupted by {error.reason}\n{HOW_TO_GO_ON}")
    elif callbacks.begun:  # otherwise nothing is known of the run yet, or the status is an earlier one's
        report = FailureReport.of(error, 0)
        named = report.secondary or not isinstance(error, StepmarkError)
        reason = report.message if named else f"{type(error).__name__}: {report.message}"
        if isinstance(error, KeyboardInterrupt):
            run_log.try_status("interrupted", step, reason)
        elif run_log.stop_reason is not None and report.secondary:
            # A signal came when training had ended here and not on another rank, or the other way round.
            signal = run_log.stop_reason.partition(":")[0]
            run_log.try_status("interrupted", step, f"{signal}: another rank has ended; the last checkpoint stands")
        else:
            keep_failure(Path(callbacks.args.output_dir), error, World.from_environment().rank)
            run_log.failed(step, reason, final=not may_be_restarted(callbacks.args.max_restarts, error))
    elif not isinstance(error, KeyboardInterrupt):
        keep_failure(Path(callbacks.args.output_dir), error, World.from_environment().rank)
