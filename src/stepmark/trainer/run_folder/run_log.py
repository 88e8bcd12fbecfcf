"""The log files of a run: metrics.jsonl, events.jsonl, status.json and the results. Only rank 0 writes them.

docs/metrics.md, docs/events.md and docs/run-folder.md describe their contents.
"""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stepmark.filesystem import files
from stepmark.filesystem.json_files import append_line, read_lines, read_object, replace_json
from stepmark.trainer.run_folder.status import FAILED, RUNNING, STATES, STATUS, RunStatus, details_in, recorded_state
from stepmark.trainer.run_folder.time_spent import seconds_in

logger = logging.getLogger("stepmark")

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
TRAINER_STATE = "trainer_state.json"  # as transformers names it
POSITION = "position"  # the event that says which samples come next
SYSTEM = "system"  # the folder of what every rank samples of its machine
PATIENCE = 5.0  # seconds
RESTARTING = "restarting"  # the event of the supervisor, before it starts the ranks again
COUNTED = {"saved": "saves", "save_failed": "save_failures", "trouble": "troubles", "started": "restarts"}  # events
_INVALID = re.compile(r"[^a-zA-Z0-9_]")
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class PrometheusFile:
    """The newest numbers of a run in the file at `path`, for node_exporter's textfile collector (Prometheus); replaced
    atomically each time. `events` are those of the run so far, which is `run`."""

    def __init__(self, path: Path, run: str, events: Iterable[Mapping[str, Any]]) -> None:
        self._path = path
        job = os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID", "")
        labels = {"run": run, "job": job, "host": socket.gethostname()}
        self._labels = ",".join(f'{key}="{text.translate(_ESCAPES)}"' for key, text in labels.items())
        self._warned = False
        self._counts: dict[str, float] = {**dict.fromkeys((*COUNTED.values(), "save_seconds"), 0), "restarts": -1}
        self._gauges: dict[str, Any] = {}
        for event in events:
            self.count(event)

    def count(self, event: Mapping[str, Any]) -> None:
        """Counts one line of events.jsonl."""
        kind = event.get("event")
        if kind in COUNTED:
            self._counts[COUNTED[kind]] += 1
        if kind == "saved":
            seconds = event.get("durable_seconds") or 0.0
            self._counts["save_seconds"] += seconds
            self._gauges |= {"last_save_seconds": seconds, "newest_checkpoint_step": event.get("step")}
        if kind in ("saved", "started"):
            self._gauges["unsaved_since"] = event.get("time")

    def write(self, status: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        """Writes the newest log and the status. A file that cannot be written does not end the run."""
        counts = {**self._counts, "tokens": metrics.get("target_tokens"), "restarts": max(self._counts["restarts"], 0)}
        spent = {f"time_spent_{part}_seconds": seconds for part, seconds in seconds_in(status).items()}
        totals = {f"{name}_total": count for name, count in counts.items()}
        numbers = {**metrics, **status, **spent, **self._gauges, **totals}
        shown = {f"stepmark_{_INVALID.sub('_', name)}": value for name, value in numbers.items() if is_number(value)}
        shown.pop("stepmark_state", None)  # a metric of that name
        counters = {f"stepmark_{name}_total" for name in counts}
        lines = []
        for name, value in shown.items():
            kind = "counter" if name in counters else "gauge"
            lines += [f"# TYPE {name} {kind}", f"{name}{{{self._labels}}} {_number(value)}"]
        lines.append("# TYPE stepmark_state gauge")
        for each in STATES:
            lines.append(f'stepmark_state{{{self._labels},state="{each}"}} {float(each == status.get("state"))}')
        try:
            files.replace_file(self._path, ("\n".join(lines) + "\n").encode(errors="replace"))
        except OSError as error:
            if not self._warned:
                logger.warning("prometheus_file: cannot write %s: %s", self._path, error.strerror)
            self._warned = True


def _number(value: float) -> str:
    if isinstance(value, int) or math.isfinite(value):
        return repr(value if isinstance(value, int) else float(value))  # a number of numpy's is one of Python's too
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def is_number(value: Any) -> bool:
    """Whether a logged value is a number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_lock = threading.RLock()  # of all logs: a thread that ends the process writes the status as well, by its own log


def keep_others_from_writing() -> None:
    """Called by a thread that is about to end the process, so that nothing is written after it. The main thread may be
    about to write that the run has begun; one that hangs in a file system is not waited for."""
    _lock.acquire(timeout=PATIENCE)


class RunLog:
    """One run's log files in `folder`. On ranks other than 0 every call does nothing."""

    def __init__(self, folder: Path, *, writes: bool) -> None:
        self.folder = folder
        self.writes = writes
        self._end: tuple[str, str | None] | None = None  # the state and reason that were recorded last
        self.stop_reason: str | None = None  # why the run was asked to stop
        self._details: dict[str, Any] | None = None  # of status.json; None where this process has no more to say
        self._last: tuple[str, int, str | None] | None = None  # the status as written
        self._numbers: dict[str, Any] = {}  # of the last log
        self.stays_done = False  # a finished run that is started again: a signal does not undo its end
        self.prometheus: PrometheusFile | None = None
        self._warned = False  # that events cannot be written

    def export(self, path: str) -> None:
        """Also keeps the newest numbers in a file for Prometheus from now on."""
        if self.writes:
            self.prometheus = PrometheusFile(Path(path), str(self.folder), read_lines(self.folder / EVENTS))
            lines = read_lines(self.folder / METRICS, lambda line: b'"loss": ' not in line)
            self._numbers = {name: value for line in lines for name, value in line.items()}

    def metrics(self, values: dict[str, Any]) -> None:
        """Appends one line to metrics.jsonl, flushed to the system. Floats keep full precision."""
        self._numbers |= values
        self._append(METRICS, values)

    def event(self, event: str, step: int, /, **values: Any) -> None:
        """Appends a line to events.jsonl. An event that cannot be written does not end the run."""
        try:
            self._append(EVENTS, {"event": event, "step": step, **values})
            if self.prometheus is not None:
                self.prometheus.count({"event": event, "step": step, "time": time.time(), **values})
        except OSError as error:
            if not self._warned:
                logger.warning("cannot write %s: %s", self.folder / EVENTS, error.strerror)
            self._warned = True

    def _append(self, name: str, values: dict[str, Any]) -> None:
        if not self.writes:
            return
        with _lock:
            files.make_folder(self.folder)  # an evaluation may be the first that writes to it
            append_line(self.folder / name, {**values, "time": time.time()})

    def attempts(self) -> int:
        """How often the run was resumed so far."""
        lines = read_lines(self.folder / METRICS, lambda line: b'"resumed"' in line)
        return sum("resumed" in line for line in lines)

    def status(self, state: str, step: int, reason: str | None = None) -> None:
        """Writes status.json. `state` is running, done, interrupted or failed; all but the first are events too."""
        if not self.writes:
            return
        with _lock:
            found = recorded_state(state, stops=self.stop_reason is not None, stays_done=self.stays_done)
            if found is None:
                return
            if found != state:
                state, reason = found, self.stop_reason
            elif state != RUNNING and self._end != (state, reason):
                self._end = (state, reason)
                self.event(state, step, reason=reason)
            self._last = (state, step, reason)
            content = self._content(state, step, reason)
            replace_json(self.folder / STATUS, content, on_full_disk=state != RUNNING)
            if self.prometheus is not None:
                self.prometheus.write(content, self._numbers)

    def _content(self, state: str, step: int, reason: str | None) -> dict[str, Any]:
        details = RunStatus.read(self.folder).details if self._details is None else self._details
        return {"state": state, "step": step, "time": time.time(), "reason": reason, **details_in(state, details)}

    def failure(self, step: int, *, final: bool, **details: Any) -> tuple[str, dict[str, Any]] | None:
        """Path and content of the status that the watchdog process writes if this one cannot; None before the first."""
        if self._last is None:
            return None
        content = self._content(FAILED if final else RUNNING, step, None)
        return str(self.folder / STATUS), {**content, **details}

    def describe(self, **details: Any) -> None:
        """Adds details to the status, from its next writing on."""
        with _lock:
            self._details = {**(self._details or {}), **details}

    def describe_now(self, **details: Any) -> None:
        """Adds details to the status of a run that is training."""
        self.describe(**details)
        if self._last is not None and self._last[0] == RUNNING:
            self.try_status(*self._last)

    def try_status(self, state: str, step: int, reason: str | None = None) -> None:
        """The same, but a status that cannot be written is a warning: it must not change how the process ends."""
        try:
            self.status(state, step, reason)
        except OSError as error:
            logger.warning("cannot write the run's status: %s", error)

    def stopping(self, step: int, reason: str) -> None:
        """Records a request to stop. The status is interrupted unless the run completes: the launcher may end it."""
        self.stop_reason, end = reason, self._end
        self.event("stopping", step, reason=reason)
        with _lock:
            if self._end == end:  # otherwise this was written so slowly that the run has ended in the meantime
                self.try_status(RUNNING, step)

    def failed(self, step: int, reason: str, *, final: bool = True) -> None:
        """Records a failure. Not `final`: the run counts as running until a supervisor fails or restarts it."""
        self.try_status(FAILED if final or self.stop_reason is not None else RUNNING, step, reason)

    def results(self, split: str, values: dict[str, Any], *, combined: bool = True) -> None:
        """Writes `<split>_results.json`, and with `combined` adds the same values to all_results.json, as transformers
        does. The epoch there stays that of training, where the evaluation is that of an earlier, best one."""
        if not self.writes:
            return
        replace_json(self.folder / f"{split}_results.json", values)
        if combined:
            path = self.folder / "all_results.json"
            before = read_object(path)
            trained = {"epoch": before["epoch"]} if "epoch" in before and split != "train" else {}
            replace_json(path, {**before, **values, **trained})


def read_metrics(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl in order."""
    return read_lines(Path(folder) / METRICS)
