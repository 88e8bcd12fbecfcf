"""From the folders of runs to a report's files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from stepmark.errors import StepmarkError
from stepmark.report.checkpoints import read_checkpoints
from stepmark.report.figures import figures, marks
from stepmark.report.history import names, read_history
from stepmark.report.page import render
from stepmark.report.pictures import require_matplotlib, write_pictures

PAGE = "report.html"


def write_report(run: Path, compare: Sequence[Path] = (), out: Path | None = None, *, png: bool = False) -> list[Path]:
    """Writes the page of a run (default: RUN/report.html), with the curves of other runs over its own; returns what was
    written. `png` writes every figure as a picture beside it too, which needs matplotlib.

    Raises UsageError where a folder is not that of a run, StepmarkError where the page cannot be written, or matplotlib
    is missing.
    """
    histories = [read_history(folder) for folder in (run, *compare)]
    drawn, marked = figures(histories), marks(histories)
    page = out if out is not None else run / PAGE
    if png:
        require_matplotlib()
    content = render(histories, drawn, marked, read_checkpoints(histories[0]), time.time())
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(content, encoding="utf-8")
    except OSError as error:
        raise StepmarkError(f"cannot write {page}: {error.strerror}; choose another file with --out") from error
    return [page, *(write_pictures(page, drawn, marked, names(histories)) if png else [])]
