"""Standard error whose reader may go, as with `2>&1 | head`: a run must not end because nobody reads its progress."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Any


class _ForgivingFile(io.FileIO):
    """A file whose writes succeed, without effect, once nobody reads them."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except BrokenPipeError:
            return len(memoryview(content).cast("B"))


def ignore_closed_stderr() -> None:
    """From now on, printing to `sys.stderr` works although its reader has gone."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or not a file
        raw = _ForgivingFile(sys.stderr.fileno(), "w", closefd=False)
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding=sys.stderr.encoding, errors="backslashreplace", line_buffering=True
        )
