"""Standard error while a run trains: plain lines or JSON objects (`log_format`), which the run's folder keeps too.

`sys.stderr` is wrapped, which covers everything that Python code prints there: this package's lines, loggers, warnings,
and the traceback of a script. Output of native code, which writes to the descriptor, is not covered.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from traceback import walk_stack
from typing import Any

from stepmark.filesystem import files

CONSOLE = "console"  # the folder of these lines, in the run's
MOST_KEPT = 1_000_000  # bytes of a file, which is then renamed to the earlier one
LONGEST = 10_000  # characters of a kept line
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")  # colours, and movements of a progress bar
_ERROR = re.compile(r"(error|failed\b[^:]*): |Traceback |(\w+\.)*\w*(Error|Exception|Interrupt|Exit)(:|$)")
_WARNING = re.compile(r"(warning|stepmark): |interrupted by ")


class Console:
    """Passes all text on to `inner`; see the module. `rank`: None for the launcher. Lines wait for the run's folder."""

    def __init__(self, inner: Any, rank: int | None) -> None:
        self.inner, self.rank = inner, rank
        self.json = False
        self._path: Path | None = None
        self._waiting: deque[str] = deque(maxlen=1000)
        self._thread = threading.local()  # no lock, which a forked process would inherit

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def write(self, text: str) -> int:
        """Keeps complete lines; with JSON, only these are passed on."""
        lines = self.shaped(self._complete(text))
        if not self.json:
            self.inner.write(text)
        elif lines:
            self.inner.write("".join(f"{line}\n" for line in lines))
        self.keep(lines)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def _complete(self, text: str) -> list[str]:
        """The lines that `text` completes, in their final form: a progress bar overwrites its own."""
        *lines, rest = f"{getattr(self._thread, 'rest', '')}{text}".split("\n")
        self._thread.rest = rest.rpartition("\r")[2][:MOST_KEPT]
        return [_CONTROL.sub("", line.rstrip("\r").rpartition("\r")[2]) for line in lines]

    def shaped(self, lines: Sequence[str]) -> list[str]:
        """The lines unchanged, or each as a JSON object, with the level of the logger that writes it."""
        return [self._object(line) for line in lines if line.strip()] if self.json else list(lines)

    def _object(self, line: str) -> str:
        if line.startswith('{"time": ') and '"level": ' in line:
            return line
        if not line[0].isspace():  # a traceback goes on
            self._thread.level = _level(line)
        return json_line({"message": line}, getattr(self._thread, "level", "info"), self.rank)

    def keep(self, lines: Sequence[str]) -> None:
        """Appends the lines to the file, if that can be written."""
        if self._path is None:
            self._waiting.extend(lines)
        elif lines:
            with contextlib.suppress(OSError):
                if self._path.exists() and self._path.stat().st_size > MOST_KEPT:
                    self._path.replace(self._path.with_suffix(".earlier.txt"))
                with files.open_for_appending(self._path) as file:
                    file.write("".join(f"{line[:LONGEST]}\n" for line in lines).encode(errors="backslashreplace"))

    def keep_in(self, folder: Path) -> None:
        """Writes lines to the folder of this run from now on, beginning with the earlier ones."""
        path = folder / CONSOLE / f"{'launcher' if self.rank is None else f'rank-{self.rank}'}.txt"
        began = time.strftime("%Y-%m-%d %H:%M:%S %z")
        title = [] if path == self._path else [f"== {began}, process {os.getpid()} on {socket.gethostname()}"]
        with contextlib.suppress(OSError):
            files.make_own_folder(path.parent)
        self._path, waiting = path, [*self._waiting]
        self._waiting.clear()
        self.keep([*self.shaped(title), *waiting])


def install(log_format: str, *, launcher: bool = False) -> None:
    """Wraps `sys.stderr`, unless it is wrapped, and sets the format. `launcher`: this process starts ranks."""
    number = os.environ.get("RANK", "")
    rank = None if launcher else int(number) if number.isdecimal() else 0
    if sys.stderr is not None and not isinstance(sys.stderr, Console):
        sys.stderr = Console(sys.stderr, rank)
    if (console := installed()) is not None:
        console.rank, console.json = rank, log_format == "json"


def installed() -> Console | None:
    """The process's console; None if there is none, or something else has replaced `sys.stderr`."""
    return sys.stderr if isinstance(sys.stderr, Console) else None


def keep_console(folder: Path) -> None:
    """Writes lines to this run's folder from now on."""
    if (console := installed()) is not None:
        console.keep_in(folder)


def json_line(values: dict[str, Any], level: str = "info", rank: int | None = 0) -> str:
    """The values as a JSON object, with time (seconds since 1970), level and rank; non-finite numbers are strings."""
    broken = {key for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    finite = {key: str(value) if key in broken else value for key, value in values.items()}
    return json.dumps({"time": time.time(), "level": level, "rank": rank, **finite}, default=str)


def _level(line: str) -> str:
    """The level of the logger that is writing this line, or the one that the line suggests."""
    for frame, _ in walk_stack(sys._getframe(1)):
        if frame.f_code is logging.StreamHandler.emit.__code__:
            return str(frame.f_locals["record"].levelname.lower())
        if frame.f_globals.get("__name__") == "warnings":
            return "warning"
    return "error" if _ERROR.match(line) else "warning" if _WARNING.match(line) else "info"
