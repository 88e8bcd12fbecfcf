"""The files that tell of a run: metrics.jsonl, events.jsonl, status.json and the results, all written by rank 0 alone.

docs/metrics.md says what is in them.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

logger = logging.getLogger("stepmark")

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
STATUS = "status.json"
NOT_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # JSON has no other word for them


class RunLog:
    """One run's log files in `folder`. On ranks other than 0 every call does nothing."""

    def __init__(self, folder: Path, *, writes: bool) -> None:
        self._folder = folder
        self.writes = writes
        self._lock = threading.RLock()  # a thread that ends the process tells the status as well
        self._told: tuple[str, str | None] | None = None
        self._stopping: str | None = None
        self._mute = False  # events cannot be written, and that was said

    def metrics(self, values: dict[str, Any]) -> None:
        """Appends one line to metrics.jsonl, flushed to the system. Floats keep full precision."""
        self._append(METRICS, values)

    def event(self, event: str, step: int, /, **values: Any) -> None:
        """Appends one line to events.jsonl: something has happened at this step. No run ends because that cannot be
        written."""
        try:
            self._append(EVENTS, {"event": event, "step": step, **values})
        except OSError as error:
            if not self._mute:
                logger.warning("cannot write %s: %s", self._folder / EVENTS, error.strerror)
            self._mute = True

    def _append(self, name: str, values: dict[str, Any]) -> None:
        if not self.writes:
            return
        line = json.dumps(_words({**values, "time": time.time()}), allow_nan=False) + "\n"
        path = self._folder / name
        with self._lock, open(path, "a", encoding="utf-8") as file:
            file.write(line if _ends_whole(path) else "\n" + line)

    def attempts(self) -> int:
        """How many times the run was resumed so far."""
        return sum("resumed" in line for line in read_metrics(self._folder))

    def status(self, state: str, step: int, reason: str | None = None) -> None:
        """`state` is running, done, interrupted or failed; how the process ends is an event as well."""
        if not self.writes:
            return
        with self._lock:
            if state == "running" and self._stopping is not None:
                state, reason = "interrupted", self._stopping
            elif state != "running" and self._told != (state, reason):
                self._told = (state, reason)
                self.event(state, step, reason=reason)
            content = {"state": state, "step": step, "time": time.time(), "reason": reason}
            replace_json(self._folder / STATUS, content)

    def try_status(self, state: str, step: int, reason: str | None = None) -> None:
        """The same, where how the process ends must not depend on it."""
        try:
            self.status(state, step, reason)
        except OSError as error:
            logger.warning("cannot write the run's status: %s", error)

    def stopping(self, step: int, reason: str) -> None:
        """The run is asked to stop. From now on its status is interrupted, unless it gets done: whoever started it may
        end it before it has stopped by itself."""
        self._stopping = reason
        self.event("stopping", step, reason=reason)
        self.try_status("running", step)

    def results(self, split: str, values: dict[str, Any]) -> None:
        """`<split>_results.json`, and the same values in all_results.json, as transformers writes them."""
        if not self.writes:
            return
        replace_json(self._folder / f"{split}_results.json", values)
        combined = self._folder / "all_results.json"
        before = json.loads(combined.read_text()) if combined.exists() else {}
        replace_json(combined, {**before, **values})


def replace_json(path: Path, content: dict[str, Any]) -> None:
    """Writes the file anew, whole or not at all. Numbers that JSON lacks (nan, inf) become null."""
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(json.dumps(_finite(content), indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def read_metrics(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl in order."""
    return read_lines(Path(folder) / METRICS)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, in order; none where there is no file. Half a line that a killed run left
    is passed over."""
    if not path.exists():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            lines.append(_numbers(value))
    return lines


def _ends_whole(path: Path) -> bool:
    """Whether the file's last line is whole: a run that was killed may have left half of one."""
    if path.stat().st_size == 0:
        return True
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _words(value: Any) -> Any:
    """The value with words for the numbers that JSON lacks."""
    if isinstance(value, dict):
        return {key: _words(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_words(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _numbers(value: Any) -> Any:
    """The value with numbers for such words."""
    if isinstance(value, dict):
        return {key: _numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_numbers(each) for each in value]
    return NOT_NUMBERS.get(value, value) if isinstance(value, str) else value


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
