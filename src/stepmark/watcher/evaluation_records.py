"""`evaluations.jsonl`: one line for each checkpoint that was evaluated, failed or was skipped, and its table as CSV.

Several watchers on several machines may add to it: a lock on a file beside it lets one write at a time, and who writes
looks first whether another has told the same. A checkpoint is known by its step and by the random name of its save, so
that one which a resumed run has saved anew is another one. `setup` names how it was evaluated.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import json
import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.directory import COORDINATION

EVALUATIONS, TABLE = "evaluations.jsonl", "evaluations.csv"
EVALUATED, FAILED, SKIPPED = "done", "failed", "skipped"
_FIRST = ("step", "status", "checkpoint", "save", "setup", "time", "reason")  # columns, before the metrics

logger = logging.getLogger("stepmark")
_here = threading.Lock()


@dataclass(frozen=True)
class EvaluationRecord:
    """A checkpoint: its step, and the name of the save that wrote it ("" where its manifest cannot be read)."""

    step: int
    save: str


class EvaluationRecords:
    """The evaluations of a run by one setup."""

    def __init__(self, run: Path, setup: str) -> None:
        self._run = run
        self._setup = setup
        self._before = len(read_evaluations(run))

    def begin(self, description: Mapping[str, Any]) -> dict[str, Any]:
        """Notes how this setup evaluates, and returns it as it was noted first."""
        with self.locked():
            for line in read_evaluations(self._run):
                if line.get("setup") == self._setup and "begun" in line:
                    return line
            line = {"setup": self._setup, "begun": time.time(), **description}
            self._append(line)
        return line

    def done(self) -> set[EvaluationRecord]:
        """The checkpoints that need not be evaluated; what had failed before is tried anew."""
        lines = enumerate(read_evaluations(self._run))
        mine = [(number, line) for number, line in lines if line.get("setup") == self._setup and "step" in line]
        return {
            EvaluationRecord(line["step"], line["save"])
            for number, line in mine
            if line["status"] != FAILED or number >= self._before
        }

    def evaluated(self) -> list[dict[str, Any]]:
        """The last evaluation of each step, by step."""
        return list({line["step"]: line for line in self.sorted() if line["status"] == EVALUATED}.values())

    def sorted(self) -> list[dict[str, Any]]:
        """The last line of each checkpoint, by step; several of one step as they were written."""
        lines = [line for line in read_evaluations(self._run) if line.get("setup") == self._setup and "step" in line]
        last = {EvaluationRecord(line["step"], line["save"]): line for line in lines}
        return sorted(last.values(), key=lambda line: int(line["step"]))

    def add(self, found: EvaluationRecord, status: str, values: Mapping[str, Any]) -> dict[str, Any] | None:
        """Tells of a checkpoint, unless that was done: then None. Call it in `locked`."""
        if found in self.done():
            return None
        head = {"step": found.step, "status": status, "checkpoint": f"checkpoint-{found.step}"}
        line = finite({**head, **values, "save": found.save, "setup": self._setup, "time": time.time()})
        self._append(line)
        self._write_table()
        return line

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """In it, no other watcher writes."""
        folder = self._run / COORDINATION
        folder.mkdir(exist_ok=True)
        with _here, open(folder / "evaluations.lock", "a") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX)
            except OSError as error:  # a file system without locks: one watcher at a time is safe there
                logger.debug("no lock on %s: %s", file.name, error)
            yield

    def _append(self, line: Mapping[str, Any]) -> None:
        path = self._run / EVALUATIONS
        text = json.dumps(line) + "\n"
        with open(path, "a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                text = text if file.read(1) == b"\n" else "\n" + text  # half a line, of a watcher that was killed
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    def _write_table(self) -> None:
        lines = [line for line in read_evaluations(self._run) if "step" in line]
        metrics = [name for line in lines for name in line if name not in _FIRST]
        table = io.StringIO()
        writer = csv.DictWriter(table, [*_FIRST[:3], *dict.fromkeys(metrics), *_FIRST[3:]], restval="")
        writer.writeheader()
        writer.writerows(sorted(lines, key=lambda line: int(line["step"])))
        temporary = self._run / f".{TABLE}.part"
        temporary.write_text(table.getvalue(), encoding="utf-8")
        temporary.replace(self._run / TABLE)


def read_evaluations(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's evaluations.jsonl; the half of one is passed over."""
    try:
        text = (run / EVALUATIONS).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    lines = []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [line for line in lines if isinstance(line, dict)]


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers that JSON lacks (nan, inf) as null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }
