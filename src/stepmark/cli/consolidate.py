"""`stepmark consolidate CHECKPOINT_OR_RUN OUT [-f safetensors|pytorch] [--max-shard-size 5GB]`"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

HELP = "turn a checkpoint, sharded or not, into a plain Hugging Face model folder"
LINE_SECONDS = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="CHECKPOINT_OR_RUN",
        type=Path,
        help="a checkpoint-N folder, or a run's folder: its newest complete checkpoint",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to make; it must not exist, or be empty")
    parser.add_argument(
        "-f", "--format", choices=("safetensors", "pytorch"), default="safetensors", help="of the files"
    )
    parser.add_argument("--max-shard-size", metavar="SIZE", default="5GB", help="of tensors in a file (default: 5GB)")


def run(parsed: argparse.Namespace) -> int:
    """Writes the folder and reports it; returns 0. Raises as `consolidate` does."""
    from stepmark.interchange.consolidate import ConsolidationListener, consolidate
    from stepmark.interchange.model_files import parse_size

    size = parse_size(parsed.max_shard_size)
    progress = _Progress()
    try:
        listener = ConsolidationListener(progress.begin, progress.advance, progress.warn)
        done = consolidate(parsed.source, parsed.out, parsed.format, size, listener)
    finally:
        progress.close()
    count = len(done.shards)
    size_text = f"{done.size / 1e6:,.1f} MB in {count} file{'s' if count > 1 else ''}"
    print(f"{done.checkpoint} consolidated into {parsed.out}: {size_text}")
    return 0


class _Progress:
    """A bar on a terminal; elsewhere a plain line every LINE_SECONDS. On stderr."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._total = self._done = 0
        self._last = time.monotonic()

    def begin(self, total: int) -> None:
        """Starts the progress of `total` bytes."""
        self.close()
        self._total, self._done = total, 0
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

            columns = (TextColumn("consolidating"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("consolidating", total=total)
            self._bar.start()

    def advance(self, count: int) -> None:
        """Reports `count` more bytes written."""
        self._done += count
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
        elif time.monotonic() - self._last >= LINE_SECONDS:
            self._last = time.monotonic()
            print(f"{self._done / 1e6:,.0f} of {self._total / 1e6:,.0f} MB", file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        """Prints a warning."""
        self.close()
        print(f"warning: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
