"""A run's history, read from its folder: in progress, done, killed or incomplete."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.manifest import MANIFEST
from stepmark.errors import UsageError
from stepmark.filesystem.json_files import read_json, read_lines
from stepmark.liveness.failure_report import FAILURES, kept_failures
from stepmark.liveness.progress import FLOOR
from stepmark.model_folder.hints import import_hint
from stepmark.report.liveness import Liveness, read_liveness, read_process
from stepmark.trainer.run_folder.run_log import EVENTS, METRICS, RESTARTING, is_number
from stepmark.trainer.run_folder.status import ENDED, FAILED, INTERRUPTED, RUNNING, STATUS, STUCK, RunStatus

EVALUATIONS = "evaluations.jsonl"
NOT_METRICS = ("_runtime", "_per_second", "_samples")  # suffixes of eval_… names that measure speed and size
JUST_BEFORE = 60.0  # seconds: ranks leave their tracebacks before the status says that the run has failed
RECENT = 20  # logs over which a speed is measured
RECORDS = (METRICS, STATUS, EVENTS, FAILURES)
NOT_RUNNING = "not running"
Line = dict[str, Any]


@dataclass(frozen=True)
class EvaluationPoint:
    """One evaluation's values under their eval_… names. `concurrent`: by `stepmark evaluate`, with this setup."""

    step: int
    time: float | None
    values: Mapping[str, float]
    concurrent: bool
    setup: str = ""


@dataclass(frozen=True)
class Attempt:
    """One attempt to train; None: unknown. `began` is in seconds since 1970, `ranks` their number, `first` the step
    from which it trained, `last` the one where it ended, with its last log at `last_time`; `ended`: how, or None;
    `snapshot`: whether it went on from one in memory."""

    began: float | None = None
    ranks: int | None = None
    first: int | None = None
    last: int | None = None
    ended: str | None = None
    last_time: float | None = None
    snapshot: bool = False

    @property
    def origin(self) -> str:
        """What the run did when this attempt, not its first, began."""
        if self.first:
            return f"resumed from {'the snapshot of step ' if self.snapshot else 'checkpoint-'}{self.first}"
        return "restarted from scratch, without a checkpoint"


@dataclass(frozen=True)
class BestEvaluation:
    """The best evaluation by this metric; the run's own where a concurrent one has the same value. Of several, the one
    with the lowest `order` is the best."""

    metric: str
    step: int
    value: float
    concurrent: bool
    order: float


@dataclass
class History:
    """Everything read from a run's folder. `logs`: the valid training lines, by step; `lost`: lines whose steps were
    trained again, one list per resumption; `closing`: the lines at the ends of processes that reached the run's last
    step; `own`: lines of values that a program has logged; `failures`: each rank's last one by its file, with its
    traceback, where the status is not newer; `liveness`: read only while the status is "running"."""

    folder: Path
    name: str
    status: Line = field(default_factory=dict)
    liveness: Liveness | None = None
    logs: list[Line] = field(default_factory=list)
    lost: list[list[Line]] = field(default_factory=list)
    closing: list[Line] = field(default_factory=list)
    own: list[Line] = field(default_factory=list)
    evaluations: list[EvaluationPoint] = field(default_factory=list)
    unevaluated: list[Line] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    events: list[Line] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def of_kind(self, *kinds: str) -> list[Line]:
        """The events of these kinds, in order."""
        return [event for event in self.events if event["event"] in kinds]

    @property
    def started(self) -> Line:
        """The newest process's "started" event; empty if there is none."""
        events = self.of_kind("started")
        return events[-1] if events else {}

    @property
    def state(self) -> str:
        """The run's status; for "running" also "not running" (no heartbeat) or "stuck" (a rank does not go on)."""
        state = str(self.status.get("state") or "unknown")
        if state == RUNNING and self.liveness and not self.liveness.alive:
            return NOT_RUNNING
        return STUCK if state == RUNNING and (self.stuck or (self.liveness and self.liveness.quiet)) else state

    @property
    def stuck(self) -> Line:
        """Which rank the others wait for, and where it is; empty if the status names none."""
        return self.status.get(STUCK) or {}

    @property
    def last_step(self) -> int | None:
        """The newest known step: of a run that has ended that of its status, which logs need not reach."""
        last, told = self.logs[-1]["step"] if self.logs else None, self.status.get("step")
        return last if told is None or (last is not None and self.state not in ENDED) else told

    @property
    def last_update(self) -> float | None:
        """When the run last wrote anything, in seconds since 1970."""
        times = [self.status.get("time"), *(line.get("time") for line in [*self.logs[-1:], *self.events[-1:]])]
        return max((time for time in times if time is not None), default=None)

    @property
    def overdue(self) -> tuple[float, float] | None:
        """Of a run that is "running" and has written nothing for much longer than between its logs before: for how many
        seconds, and the longest time between two of the last logs; else None."""
        lines, began = [self.started, *self.logs[-RECENT:]], self.started.get("time") or 0.0
        times = [at for line in lines if (at := line.get("time")) is not None and at >= began]
        usual = max((after - before for before, after in pairwise(times)), default=0.0)
        age = time.time() - (self.last_update or math.inf)
        return (age, usual) if self.state == RUNNING and len(times) > 1 and age > max(3 * usual, FLOOR) else None

    @property
    def target_tokens(self) -> int | None:
        """Target tokens of the loss so far, by the newest line that has them."""
        counts = [line.get("target_tokens") for line in [*self.logs[-1:], *self.closing[-1:]]]
        return max((count for count in counts if isinstance(count, int)), default=None)

    @property
    def of_bytes(self) -> bool:
        """Whether the model's tokens are bytes, by the tokenizer of a checkpoint or of the folder itself."""
        paths = [*self.folder.glob("checkpoint-*/tokenizer.json"), self.folder / "tokenizer.json"]
        try:
            return len(read_json(paths[0], follow=True)["model"]["vocab"]) == 256
        except (OSError, ValueError, LookupError, TypeError):
            return False

    def resumptions(self) -> list[tuple[Attempt, Attempt]]:
        """Each process that was followed by another, paired with its successor."""
        return list(zip(self.attempts, self.attempts[1:], strict=False))

    def best(self) -> BestEvaluation | None:
        """By `metric_for_best_model` if the run has one, else by the lowest loss, of several sets that of the first."""
        losses = sorted({name for each in self.evaluations for name in each.values if name.endswith("_loss")})
        first = "eval_loss" if "eval_loss" in losses or not losses else losses[0]
        metric = self.started.get("metric_for_best_model") or first
        sign = -1.0 if self.started.get("greater_is_better") else 1.0
        found = [
            (sign * each.values[metric], each.step, each.concurrent)
            for each in self.evaluations
            if metric in each.values and math.isfinite(each.values[metric])
        ]
        if not found:
            return None
        value, step, concurrent = min(found)
        return BestEvaluation(metric, step, sign * value, concurrent, value)


def find_runs(folder: Path) -> list[Path]:
    """The folder itself if a run has written it, else the runs anywhere in it, by name, with numbers by value.

    Raises UsageError if the folder does not exist or contains no run.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} does not exist; pass a run's output_dir")
    found = [folder] if _is_run(folder) else sorted(_runs_in(folder), key=_natural)
    if not found:
        why = f"{folder} is not a run's output_dir: it contains neither {METRICS} nor a checkpoint, nor runs"
        raise UsageError(why)
    return found


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in RECORDS) or any(folder.glob("checkpoint-*"))


def of_another_tool(folder: Path) -> bool:
    """Whether the folder is a run's by its checkpoints alone, and these are another tool's."""
    saved = [*folder.glob("checkpoint-*")]
    recorded = any((folder / name).exists() for name in RECORDS)
    ours = any((path / MANIFEST).exists() for path in saved)
    return not recorded and not ours and any(import_hint(path, "") for path in saved)


def _runs_in(folder: Path) -> Iterator[Path]:
    for inner in folder.iterdir():
        if inner.is_dir() and not inner.name.startswith("."):
            if _is_run(inner):
                yield inner
            elif not inner.is_symlink():  # which may lead back
                yield from _runs_in(inner)


def _natural(path: Path) -> list[tuple[float, str]]:
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)", str(path))
    return [(float(part) if index % 2 else math.inf, part) for index, part in enumerate(parts)]


def read_history(folder: Path, *, recent: bool = False) -> History:
    """Reads the folder of a run. With `recent`, there are only the last logs, and no events of saves.

    Raises UsageError if the folder does not exist or does not belong to a run.
    """
    if find_runs(folder) != [folder]:
        raise UsageError(f"{folder} is not a run's output_dir: it contains neither {METRICS} nor a checkpoint")
    history = History(folder, folder.resolve().name, status=RunStatus.read(folder).content)
    history.failures = kept_failures(folder, history.status.get("time", 0.0) - JUST_BEFORE)
    if not history.status and history.failures:  # it has failed before it trained
        history.status = {"state": FAILED, "reason": next(iter(history.failures.values())).partition("\n")[0]}
    if history.status.get("state") == RUNNING:
        history.liveness = read_liveness(folder) or read_process(history.status)
    events = read_lines(folder / EVENTS, (lambda line: b'"event": "save' not in line) if recent else bool)
    history.events = [line for line in events if line.get("event")]
    _sort_metrics(history, read_lines(folder / METRICS, (lambda line: b'"loss": ' not in line) if recent else bool))
    if recent and len(history.logs) < RECENT:  # the last ones may be farther from the end, if they were trained again
        return read_history(folder)
    _add_concurrent_evaluations(history, read_lines(folder / EVALUATIONS))
    return history


def _sort_metrics(history: History, lines: Sequence[Line]) -> None:
    """Training lines, evaluations and attempts. After a resumption steps appear again, and the last one counts."""
    logs: dict[int, Line] = {}
    evaluations: dict[int, Line] = {}
    closing: dict[int, Line] = {}
    attempts = [Attempt()]
    snapshots = {event.get("attempt") for event in history.of_kind("resumed") if event.get("checkpoint") == "memory"}

    def discard(after: int) -> None:
        """Moves the steps after this one to `lost`, and drops their evaluations."""
        lost = [lines.pop(step) for lines in (logs, closing) for step in sorted(lines) if step > after]
        history.lost += [lost] if lost else []
        for step in [step for step in evaluations if step > after]:
            del evaluations[step]

    for line in lines:
        step = line.get("step")
        if "resumed" in line:
            last = max(logs, default=None)
            last_time = None if last is None else logs[last].get("time")
            attempts[-1] = replace(attempts[-1], last=last, last_time=last_time)
            snapshot = line.get("attempt") in snapshots
            attempts.append(Attempt(line.get("time"), first=line["resumed"], snapshot=snapshot))
            discard(line["resumed"] or 0)
            history.own = [own for own in history.own if own["step"] <= (line["resumed"] or 0)]
        elif step is not None and "loss" in line:
            if step in logs:
                discard(step - 1)
            logs[step] = line
        elif step is not None and "train_runtime" in line:
            closing[step] = line
        elif step is not None and (values := _metrics_of(line)):
            evaluations[step] = {**evaluations.get(step, {}), "time": line.get("time"), **values}
        elif step is not None:
            history.own.append(line)
    history.logs = [logs[step] for step in sorted(logs)]
    history.closing = [closing[step] for step in sorted(closing)]
    history.evaluations = [
        EvaluationPoint(step, evaluations[step].pop("time"), evaluations[step], concurrent=False)
        for step in sorted(evaluations)
    ]
    history.attempts = _with_ends(history, attempts)


def _metrics_of(line: Line) -> dict[str, float]:
    return {
        key: float(value)
        for key, value in line.items()
        if key.startswith("eval_") and not key.endswith(NOT_METRICS) and is_number(value)
    }


def _add_concurrent_evaluations(history: History, lines: Sequence[Line]) -> None:
    """If a step was evaluated more than once with the same setup, the last result counts."""
    found: dict[tuple[str, int], EvaluationPoint] = {}
    failed: dict[int, Line] = {}
    for line in lines:
        step, values = line.get("step"), _metrics_of(line)
        if step is None:
            continue
        setup = str(line.get("setup", ""))
        if line.get("status", "done") == "done" and values:
            found[setup, step] = EvaluationPoint(step, line.get("time"), values, concurrent=True, setup=setup)
            failed.pop(step, None)
        elif line.get("status") == "failed":
            failed[step] = line
    history.evaluations += [found[key] for key in sorted(found)]
    history.unevaluated = [failed[step] for step in sorted(failed)]


KILLED = "ended without a status"


def _with_ends(history: History, attempts: Sequence[Attempt]) -> list[Attempt]:
    """The processes of the run, with how each ended, before the next started; and when the first began."""
    firsts = [*history.of_kind("started")[:1], *(history.lost[0][:1] if history.lost else []), *history.logs[:1]]
    began = min((time for line in firsts if (time := line.get("time")) is not None), default=None)
    newest = replace(attempts[-1], last=history.last_step, last_time=history.last_update)
    known = [*attempts[:-1], newest]
    known[0] = replace(known[0], began=began)
    found = []
    for each, after in zip_longest(known, known[1:]):
        until = math.inf if after is None or after.began is None else after.began
        ended = _ending(history, each.began or 0.0, until)
        found.append(replace(each, ended=KILLED if ended is None and after and history.events else ended))
    return found


def _ending(history: History, began: float, until: float) -> str | None:
    """How a process that ran between these times reported its end."""
    ends = [event for event in history.of_kind(*ENDED) if began <= (event.get("time") or 0.0) <= until]
    if not ends:
        asked = [event for event in history.of_kind("stopping") if began <= (event.get("time") or 0.0) <= until]
        told = history.status.get("state") == INTERRUPTED or math.isfinite(until)
        return f"interrupted: {asked[-1].get('reason')}, before it stopped by itself" if asked and told else None
    return _told(ends[-1])


def _told(event: Line) -> str:
    """An ending and its reason."""
    kind = FAILED if event["event"] == RESTARTING else str(event["event"])
    return f"{kind}: {event['reason']}" if event.get("reason") else kind


def names(histories: Sequence[History]) -> list[str]:
    """The runs' names, or where two are equal their paths from the folder that contains all; one name for each run."""
    plain = [history.name for history in histories]
    folders = [history.folder.resolve() for history in histories]
    if len(set(plain)) == len(set(folders)):
        return plain
    parent = os.path.commonpath(folders)
    return [os.path.relpath(folder, parent) for folder in folders]


def short_names(histories: Sequence[History]) -> list[str]:
    """`names`, in whose comma-separated parts the beginning that all runs share is cut, up to its last separator."""
    rows = [name.split(",") for name in names(histories)]
    columns = []
    for parts in zip_longest(*rows, fillvalue=""):
        shared = re.match(r"(.*(?:[=/_ ]|(?<!\de)-))?", os.path.commonprefix(parts))  # noqa: RUF071 - of characters
        cut = len(shared[0]) if shared is not None and len(set(parts)) > 1 else 0
        columns.append([part[cut:] for part in parts])
    return [",".join(filter(None, row)) for row in zip(*columns, strict=True)]


def best_of(histories: Sequence[History]) -> int | None:
    """The index of the run with the best evaluation; None of one run, or where runs have different metrics."""
    found = [(best.order, index, best.metric) for index, each in enumerate(histories) if (best := each.best())]
    comparable = len(histories) > 1 and len({metric for *_, metric in found}) == 1
    return min(found)[1] if comparable else None


def read_attempts(history: History) -> list[Attempt]:
    """The attempts in order. One that did not get as far as training is known if it was the supervisor's."""
    found: list[Attempt] = []
    ended = True  # what follows is of another attempt, begun or not
    for event in history.of_kind("started", RESTARTING, *ENDED):
        if event["event"] == "started":
            found.append(Attempt(event.get("time"), event.get("ranks"), event.get("step")))
        else:
            found += [Attempt()] if ended else []
            # The step 0 stands for none in what a supervisor writes.
            found[-1] = replace(found[-1], last=event.get("step") or None, ended=_told(event))
        ended = event["event"] == RESTARTING
    runs = history.state in (RUNNING, STUCK)
    if found and found[-1].ended is None:
        found[-1] = replace(found[-1], last=history.last_step, ended=None if runs else KILLED)
    return [*(replace(each, ended=each.ended or KILLED) for each in found[:-1]), *found[-1:]]
