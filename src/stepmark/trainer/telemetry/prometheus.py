"""The newest metrics of a run as a text file for Prometheus, which node_exporter's textfile collector reads."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepmark.filesystem import files

logger = logging.getLogger("stepmark")

STATES = ("running", "done", "interrupted", "failed")
_INVALID = re.compile(r"[^a-zA-Z0-9_]")


class PrometheusFile:
    """The file at `path`, replaced atomically each time. `run` labels all values."""

    def __init__(self, path: Path, run: str) -> None:
        self._path = path
        self._labels = {"run": run}
        self._warned = False

    def write(self, status: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        """Writes the numbers of the newest log and of the status. A file that cannot be written does not end the
        run."""
        numbers = {**metrics, **status}
        lines = [line for name, value in numbers.items() if _is_number(value) for line in self._gauge(name, value)]
        lines += self._state(str(status.get("state")))
        try:
            files.replace_file(self._path, ("\n".join(lines) + "\n").encode())
        except OSError as error:
            if not self._warned:
                logger.warning("prometheus_file: cannot write %s: %s", self._path, error.strerror)
            self._warned = True

    def _gauge(self, name: str, value: float) -> list[str]:
        full = f"stepmark_{_INVALID.sub('_', name)}"
        return [f"# TYPE {full} gauge", _sample(full, self._labels, value)]

    def _state(self, state: str) -> list[str]:
        name = "stepmark_state"
        return [
            f"# TYPE {name} gauge",
            *(_sample(name, {**self._labels, "state": each}, float(each == state)) for each in STATES),
        ]


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    listed = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{listed}}} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
