"""Writes evaluations outside of training as TensorBoard scalars, where TensorBoard is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepmark.watcher.evaluation_records import EVALUATED

FOLDER = Path("runs") / "evaluation"  # beside the folders of training
_NO_SCALARS = ("step", "time", "world_size")


class Scalars:
    """Writes each evaluation once, under `eval/…`, the names that the callback in training uses."""

    def __init__(self, run: Path) -> None:
        self._folder = run / FOLDER
        self._writer: Any = None

    def add(self, line: Mapping[str, Any]) -> None:
        """A line of evaluations.jsonl."""
        if line["status"] != EVALUATED or importlib.util.find_spec("tensorboard") is None:
            return
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder))
        for name, value in line.items():
            if name not in _NO_SCALARS and isinstance(value, (int, float)):
                self._writer.add_scalar(name.replace("eval_", "eval/", 1), value, line["step"], line["time"])
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()
