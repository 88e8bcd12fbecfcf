"""`evaluations.jsonl`: one line for each checkpoint that was evaluated, failed or was skipped; and the same as CSV.

Watchers on several machines may write to it: a lock on a file beside it lets one write at a time, and a writer first
checks whether another has recorded the same checkpoint. A checkpoint is identified by its step and by the random name
of its save, so one that a resumed run has saved again is a different one. `setup` identifies how it was evaluated.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.checkpoint_folders import COORDINATION
from stepmark.filesystem import files
from stepmark.filesystem.json_files import append_line, finite, read_lines

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
        """Records how this setup evaluates, and returns the first record of it."""
        with self.locked():
            for line in read_evaluations(self._run):
                if line.get("setup") == self._setup and "begun" in line:
                    return line
            line = {"setup": self._setup, "begun": time.time(), **description}
            append_line(self._run / EVALUATIONS, line, durable=True)
        return line

    def done(self) -> set[EvaluationRecord]:
        """The checkpoints that need not be evaluated; those that failed in earlier processes are tried again."""
        return {each for each, number, line in self._lines() if line["status"] != FAILED or number >= self._before}

    def evaluated(self) -> list[dict[str, Any]]:
        """The last evaluation of each step, by step."""
        return list({line["step"]: line for line in self.sorted() if line["status"] == EVALUATED}.values())

    def sorted(self) -> list[dict[str, Any]]:
        """The last line of each checkpoint, by step; several of one step in the order of writing."""
        return sorted({each: line for each, _, line in self._lines()}.values(), key=lambda line: int(line["step"]))

    def _lines(self) -> Iterator[tuple[EvaluationRecord, int, dict[str, Any]]]:
        """Each line of this setup, after its checkpoint and its number in the file."""
        for number, line in enumerate(read_evaluations(self._run)):
            if line.get("setup") == self._setup and "step" in line:
                yield EvaluationRecord(line["step"], line["save"]), number, line

    def add(self, found: EvaluationRecord, status: str, values: Mapping[str, Any]) -> dict[str, Any] | None:
        """Records a checkpoint and returns its line; None where that was done before. Call it in `locked`."""
        if found in self.done():
            return None
        head = {"step": found.step, "status": status, "checkpoint": f"checkpoint-{found.step}"}
        line = finite({**head, **values, "save": found.save, "setup": self._setup, "time": time.time()})
        append_line(self._run / EVALUATIONS, line, durable=True)
        write_table(self._run)
        return line

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Inside the block, no other watcher writes."""
        folder = self._run / COORDINATION
        files.make_own_folder(folder)
        with _here, files.open_for_appending(folder / "evaluations.lock") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX)
            except OSError as error:  # on a file system without locks, only one watcher at a time is safe
                logger.debug("no lock on %s: %s", file.name, error)
            yield


def write_table(run: Path) -> None:
    """Writes evaluations.csv anew."""
    lines = [line for line in read_evaluations(run) if "step" in line]
    metrics = [name for line in lines for name in line if name not in _FIRST]
    table = io.StringIO()
    writer = csv.DictWriter(table, [*_FIRST[:3], *dict.fromkeys(metrics), *_FIRST[3:]], restval="")
    writer.writeheader()
    writer.writerows(sorted(lines, key=lambda line: int(line["step"])))
    files.replace_file(run / TABLE, table.getvalue().encode())


def read_evaluations(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's evaluations.jsonl; partial ones are skipped."""
    return read_lines(run / EVALUATIONS)
