"""Evaluations as text: a line for each as it completes, a table at the end, or JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.checkpoint_folders import step_of
from stepmark.trainer.telemetry.progress import QUIET
from stepmark.watcher.evaluation_records import EVALUATED, FAILED, TABLE, finite

Lines = Sequence[Mapping[str, Any]]
Samples = Mapping[str | None, int]


def line_of(line: Mapping[str, Any], best: bool) -> str:
    """A line of evaluations.jsonl in readable form."""
    if line["status"] != EVALUATED:
        return f"step {line['step']}: {line['status']}: {line['reason']}"
    shown = [f"{name.removeprefix('eval_')} {_number(line[name])}" for name in _metrics([line])]
    return f"step {line['step']}: {', '.join(shown)}{' (best)' if best else ''}"


def table_of_model(path: Path, samples: Samples, metrics: Mapping[str, float]) -> str:
    """All numbers of one model; `samples` are those of each set."""
    count = ", ".join(f"{count} samples" + (f" of {name}" if name else "") for name, count in samples.items())
    head = f"{path}: {count}" if count else str(path)
    return f"{head}\n{table([(name, _number(value)) for name, value in metrics.items()])}"


def json_of_model(path: Path, samples: Samples, metrics: Mapping[str, float]) -> str:
    """All numbers of one model as one JSON object."""
    named = {name or "": count for name, count in samples.items()}
    return json.dumps({"path": str(path), "step": step_of(path), "samples": named, **finite(metrics)})


def table_of_run(run: Path, lines: Lines, best: int | None) -> str:
    """A row for each evaluation, and the number of each status."""
    evaluated = [line for line in lines if line["status"] == EVALUATED]
    failed = sum(line["status"] == FAILED for line in lines)
    skipped = len(lines) - len(evaluated) - failed
    last = f"{len(evaluated)} evaluated, {skipped} skipped, {failed} failed; see {run / TABLE}"
    if not evaluated:
        return last
    names = _metrics(evaluated)
    rows = [["step", *names]]
    for line in evaluated:
        step = f"{line['step']} (best)" if line["step"] == best else str(line["step"])
        rows.append([step, *(_number(line.get(name)) for name in names)])
    return f"{table(rows)}\n{last}"


def json_of_run(run: Path, lines: Lines, best: int | None) -> str:
    """All evaluations of a run as one JSON object."""
    return json.dumps({"path": str(run), "best": best, "evaluations": list(lines)})


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text in columns; the first is left-aligned, the others right-aligned."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _metrics(evaluated: Lines) -> list[str]:
    names = dict.fromkeys(name for line in evaluated for name in line if name.startswith("eval_"))
    return [name for name in names if not name.endswith(QUIET)]


def _number(value: Any) -> str:
    if value is None:
        return "not finite"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
