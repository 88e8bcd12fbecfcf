"""Writes the report of a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from stepmark.errors import StepmarkError
from stepmark.report.checkpoints import read_checkpoints
from stepmark.report.figures import figures, marks
from stepmark.report.history import read_history
from stepmark.report.page import render

PAGE = "report.html"


def write_report(run: Path, compare: Sequence[Path] = (), out: Path | None = None) -> Path:
    """Writes the page of a run (default: RUN/report.html), with the curves of other runs over its own, and returns its
    path.

    Raises UsageError if a folder is not a run's output_dir, StepmarkError if the page cannot be written.
    """
    histories = [read_history(folder) for folder in (run, *compare)]
    page = out if out is not None else run / PAGE
    content = render(histories, figures(histories), marks(histories), read_checkpoints(histories[0]), time.time())
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(content, encoding="utf-8")
    except OSError as error:
        raise StepmarkError(f"cannot write {page}: {error.strerror}; choose another file with --out") from error
    return page
