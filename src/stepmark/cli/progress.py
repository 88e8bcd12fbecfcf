"""Progress of commands that write many bytes: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from stepmark.filesystem.printable import printable
from stepmark.model_folder.new_folder import WritingListener

LINE_SECONDS = 10.0


class BytesProgress:
    """A bar on a terminal; elsewhere a plain line every LINE_SECONDS. On stderr. Entered, it is a WritingListener."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._bar: Any = None
        self._total = self._done = 0
        self._last = time.monotonic()

    def __enter__(self) -> WritingListener:
        return WritingListener(self.begin, self.advance, self.warn)

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, total: int) -> None:
        self.close()
        self._total, self._done = total, 0
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

            columns = (TextColumn(self._what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task(self._what, total=total)
            self._bar.start()

    def advance(self, count: int) -> None:
        self._done += count
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
        elif time.monotonic() - self._last >= LINE_SECONDS:
            self._last = time.monotonic()
            print(f"{self._done / 1e6:,.0f} of {self._total / 1e6:,.0f} MB", file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        self.close()
        print(printable(f"warning: {text}"), file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
