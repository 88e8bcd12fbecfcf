"""Records evaluations, on one rank: the line, the link to the best checkpoint, TensorBoard, and requests to stop."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.checkpoint_folders import checkpoint_path, point_best
from stepmark.config.contradictions import LOWER_IS_BETTER
from stepmark.errors import UsageError
from stepmark.filesystem.files import make_own_folder
from stepmark.trainer.interruption.run_end import ask_to_stop
from stepmark.watcher.evaluation_data import Request
from stepmark.watcher.evaluation_records import EVALUATED, FAILED, EvaluationRecord, EvaluationRecords
from stepmark.watcher.scheduler import RunState

FOLDER = Path("runs") / "evaluation"  # beside the folders of training
_NO_SCALARS = ("step", "time", "world_size")


@dataclass(frozen=True)
class BestTracker:
    """The metric that decides, and whether greater values are better."""

    metric: str
    greater_is_better: bool

    @classmethod
    def choose(
        cls, metric: str | None, greater_is_better: bool | None, first: Mapping[str, Any], *, needed: bool
    ) -> BestTracker | None:
        """Finds `metric`, given with or without `eval_`, in the `first` evaluation; None stands for the loss, or else
        for the first metric that is a loss. Returns None where there is none and none is `needed`.

        Raises UsageError where the evaluation does not have the metric.
        """
        names = [name for name in first if name.startswith("eval_")]
        losses = ["eval_loss", *(name for name in names if name.endswith("_loss"))]
        wanted = losses if metric is None else [metric, f"eval_{metric}"]
        chosen = next((name for name in wanted if name in names), None)
        if chosen is None and (needed or metric is not None):
            found = ", ".join(sorted(names)) or "no metrics"
            raise UsageError(f"--metric {metric or 'loss'}: the evaluation has no such metric; it has {found}")
        if chosen is None:
            return None
        greater = not chosen.endswith(LOWER_IS_BETTER)
        return cls(chosen, greater if greater_is_better is None else greater_is_better)

    def step(self, evaluated: Sequence[Mapping[str, Any]]) -> int | None:
        """The step of the best evaluation, the earliest of equal ones; None where all of them lack the metric or it is
        not finite. A checkpoint whose loss is not finite is never the best, whatever its other metrics are."""
        scored = [line for line in evaluated if None not in (line.get(self.metric), line.get("eval_loss", 0.0))]
        sign = -1.0 if self.greater_is_better else 1.0
        best = min(scored, key=lambda line: (sign * line[self.metric], line["step"]), default=None)
        return None if best is None else int(best["step"])

    def since(self, evaluated: Sequence[Mapping[str, Any]]) -> int:
        """The number of evaluations after the best one."""
        best = self.step(evaluated)
        return sum(best is None or line["step"] > best for line in evaluated)


@dataclass(eq=False)
class EvaluationRecorder:
    """Keeps the records of one setup. `failures` counts the evaluations that failed; `best` is the step of the best
    evaluated checkpoint that exists, which the run's link follows with `moves_best`. `show` gets each line of
    evaluations.jsonl and whether it is the best, `say` other messages."""

    request: Request
    records: EvaluationRecords
    show: Callable[[dict[str, Any], bool], None]
    say: Callable[[str], None]
    moves_best: bool
    best: int | None = None
    failures: int = 0
    _best: BestTracker | None = None
    _asked_to_stop: bool = False
    _compared: Sequence[Mapping[str, Any]] = field(default_factory=list)  # the evaluations that it is the best of
    _writer: Any = None  # for TensorBoard

    def __post_init__(self) -> None:
        self.follow()  # a watcher that was killed may not have updated the link

    def follow(self) -> None:
        """Takes account of what other watchers have recorded, and of which checkpoints are left."""
        if self._left() != self._compared:
            with self.records.locked():
                self._find_best()

    def record(self, found: EvaluationRecord, status: str, values: Mapping[str, Any]) -> None:
        """Records a checkpoint, unless another watcher has. `values` are metrics, or the reason why there are none.

        Raises UsageError where the evaluation lacks the metric for the best checkpoint.
        """
        self.failures += status == FAILED
        with self.records.locked():  # so that other watchers do not link an outdated best checkpoint
            line = self.records.add(found, status, values)
            best = self._find_best() if line is not None and status == EVALUATED else None
        if line is None:
            return
        self.show(line, best == found.step)
        if status == EVALUATED:
            self._write_scalars(line)
            self._check_patience()

    def _write_scalars(self, line: Mapping[str, Any]) -> None:
        """To TensorBoard under `eval/…`, the names that the callback in training uses."""
        if importlib.util.find_spec("tensorboard") is None:
            return
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            for folder in (FOLDER.parent, FOLDER):
                make_own_folder(self.request.path / folder)
            self._writer = SummaryWriter(str(self.request.path / FOLDER))
        for name, value in line.items():
            if name not in _NO_SCALARS and isinstance(value, (int, float)):
                self._writer.add_scalar(name.replace("eval_", "eval/", 1), value, line["step"], line["time"])
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _left(self) -> list[dict[str, Any]]:
        """The evaluations whose checkpoints exist."""
        lines = self.records.evaluated()
        return [line for line in lines if checkpoint_path(self.request.path, line["step"]).is_dir()]

    def _find_best(self) -> int | None:
        """The step of the best evaluated checkpoint that exists, which is linked as `best` where that is wanted."""
        asked, self._compared = self.request, self._left()
        if self._best is None and self._compared:
            needed, first = asked.patience is not None, self._compared[0]
            self._best = BestTracker.choose(asked.metric, asked.greater_is_better, first, needed=needed)
        if self._best is None:
            return None
        self.best = self._best.step(self._compared)
        if self.best is not None and self.moves_best:
            point_best(asked.path, self.best)
        return self.best

    def _check_patience(self) -> None:
        patience = self.request.patience
        if patience is None or self._asked_to_stop or self._best is None:
            return
        evaluated = self.records.evaluated()
        since = self._best.since(evaluated)
        if since < patience or RunState(self.request.path).ended() is not None:
            return
        best = self._best.step(evaluated)
        reason = f"{self._best.metric} has not improved for {since} evaluations, since step {best}"
        ask_to_stop(self.request.path, reason)
        self._asked_to_stop = True
        self.say(f"asked the run to stop: {reason}")
