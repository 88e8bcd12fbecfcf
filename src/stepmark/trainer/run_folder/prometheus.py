"""The newest numbers of a run as a text file for node_exporter's textfile collector (Prometheus)."""

from __future__ import annotations

import logging
import math
import os
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stepmark.filesystem import files
from stepmark.trainer.run_folder.status import STATES

logger = logging.getLogger("stepmark")

COUNTED = {"saved": "saves", "save_failed": "save_failures", "trouble": "troubles"}  # events
_INVALID = re.compile(r"[^a-zA-Z0-9_]")


class PrometheusFile:
    """The file at `path`, replaced atomically each time. `events` are those of the run so far, which is `run`."""

    def __init__(self, path: Path, run: str, events: Iterable[Mapping[str, Any]]) -> None:
        self._path = path
        job = os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID", "")
        self._labels = {"run": run, "job": job, "host": socket.gethostname()}
        self._warned = False
        self._counts: dict[str, float] = dict.fromkeys((*COUNTED.values(), "save_seconds"), 0)
        self._gauges: dict[str, Any] = {}
        self._starts = 0
        for event in events:
            self.count(event)

    def count(self, event: Mapping[str, Any]) -> None:
        """Counts one line of events.jsonl."""
        kind = event.get("event")
        self._starts += kind == "started"
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
        counts = {**self._counts, "tokens": metrics.get("target_tokens"), "restarts": max(self._starts - 1, 0)}
        numbers = {**metrics, **status, **self._gauges, **{f"{name}_total": count for name, count in counts.items()}}
        shown = {f"stepmark_{_INVALID.sub('_', name)}": value for name, value in numbers.items() if _is_number(value)}
        shown.pop("stepmark_state", None)  # a metric of that name
        counters = {f"stepmark_{name}_total" for name in counts}
        lines = []
        for name, value in shown.items():
            lines += [_type(name, counter=name in counters), _sample(name, self._labels, value)]
        lines += self._state(str(status.get("state")))
        try:
            files.replace_file(self._path, ("\n".join(lines) + "\n").encode(errors="replace"))
        except OSError as error:
            if not self._warned:
                logger.warning("prometheus_file: cannot write %s: %s", self._path, error.strerror)
            self._warned = True

    def _state(self, state: str) -> list[str]:
        name = "stepmark_state"
        return [_type(name), *(_sample(name, {**self._labels, "state": each}, float(each == state)) for each in STATES)]


def _type(name: str, *, counter: bool = False) -> str:
    return f"# TYPE {name} {'counter' if counter else 'gauge'}"


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    listed = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{listed}}} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if isinstance(value, int) or math.isfinite(value):
        return repr(value if isinstance(value, int) else float(value))  # a number of numpy's is one of Python's too
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
