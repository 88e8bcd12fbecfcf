"""The files that tell of a run: metrics.jsonl, status.json and the results, all written by rank 0 alone."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
STATUS = "status.json"


class Journal:
    """One run's log files in `folder`. On ranks other than 0 every call does nothing."""

    def __init__(self, folder: Path, *, writes: bool) -> None:
        self._folder = folder
        self._writes = writes
        self._lock = threading.Lock()  # a thread that ends the process tells the status as well
        self._stopping: str | None = None

    def metrics(self, values: dict[str, Any]) -> None:
        """Appends one line to metrics.jsonl, flushed to the system. Floats keep full precision."""
        if not self._writes:
            return
        line = json.dumps({**values, "time": time.time()}) + "\n"
        with open(self._folder / METRICS, "a", encoding="utf-8") as file:
            file.write(line if self._ends_whole() else "\n" + line)

    def _ends_whole(self) -> bool:
        """Whether the file's last line is whole: a run that was killed may have left half of one."""
        path = self._folder / METRICS
        if not path.exists() or path.stat().st_size == 0:
            return True
        with open(path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def attempts(self) -> int:
        """How many times the run was resumed so far."""
        return sum("resumed" in line for line in read_metrics(self._folder))

    def status(self, state: str, step: int, reason: str | None = None) -> None:
        """`state` is running, done, interrupted or failed."""
        if not self._writes:
            return
        with self._lock:
            if state == "running" and self._stopping is not None:
                state, reason = "interrupted", self._stopping
            content = {"state": state, "step": step, "time": time.time(), "reason": reason}
            replace_json(self._folder / STATUS, content)

    def stopping(self, step: int, reason: str) -> None:
        """The run is asked to stop. From now on its status is interrupted, unless it gets done: whoever started it may
        end it before it has stopped by itself."""
        self._stopping = reason
        self.status("running", step)

    def results(self, split: str, values: dict[str, Any]) -> None:
        """`<split>_results.json`, and the same values in all_results.json, as transformers writes them."""
        if not self._writes:
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
    """The lines of metrics.jsonl in order; a half line that a killed run left is passed over."""
    path = Path(folder) / METRICS
    if not path.exists():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return lines


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
