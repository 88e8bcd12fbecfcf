"""Reports of why ranks failed, so that the user reads the first cause, once.

Under `--nproc` each rank writes a report to the supervisor's folder, and the supervisor prints one. Under other
launchers the ranks agree through their store: the first to fail prints.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sysconfig
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from stepmark.errors import (
    CheckpointBusy,
    CheckpointMismatch,
    DataError,
    DataWorkerLost,
    FileRefused,
    MetricsError,
    PeerFailed,
    StepmarkError,
    TrainingDiverged,
    UsageError,
)
from stepmark.filesystem import files
from stepmark.filesystem.error_advice import causes, is_trouble, with_advice
from stepmark.filesystem.printable import printable
from stepmark.liveness.console import keep_console

REPORTS = "STEPMARK_REPORTS"
SECRET = "STEPMARK_SECRET"  # of a run's ranks (messages.py)
OUTPUT_CLOSED = "standard output is closed"  # the message of a rank whose reader is gone, which is shown nowhere
TIMED_OUT = re.compile(r"Timed out waiting (\d+)ms for ")  # gloo's words
FAILURES = "failures"  # the folder of the ranks' tracebacks, in the run's
TITLE = "== "  # begins the line above each of them
MOST_KEPT = 100_000  # characters of one traceback, and of those before it
_KEPT = "_stepmark_kept"  # the attribute of an error whose traceback is in the run's folder
_PERMANENT = (UsageError, DataError, MetricsError, CheckpointMismatch, TrainingDiverged, KeyboardInterrupt)
PEER_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")


_BEYOND = {  # torch's words
    re.compile("index out of range in self"): (
        "a token id, or a position, is beyond the model's embeddings: compare them with its vocab_size"
    ),
    re.compile(r"Target -?\d+ is out of bounds\."): (
        "a label is beyond the model's outputs: compare the labels with its num_labels, or vocab_size; -100 is ignored"
    ),
}


@dataclass(frozen=True)
class FailureReport:
    """Why one rank failed. `secondary`: a consequence of another rank's failure, such as a lost connection.
    `permanent`: a restart would fail in the same way, since the call or the data is wrong."""

    rank: int
    message: str
    details: str
    exit_code: int
    secondary: bool
    time: float
    permanent: bool = False

    @classmethod
    def of(cls, error: BaseException, rank: int) -> FailureReport:
        known = isinstance(error, StepmarkError)
        text = _without_traceback(str(error).strip())
        lost = isinstance(error, RuntimeError) and not known and any(sign in text for sign in PEER_LOST)
        message = text if known else f"{type(error).__name__}: {text}" if text else type(error).__name__
        late = isinstance(error, RuntimeError) and not known and TIMED_OUT.search(text) is not None
        message = describe_lost_peer(text) if lost or late else with_advice(message, error)
        if isinstance(error, IndexError):
            message += next((f"; {advice}" for words, advice in _BEYOND.items() if words.fullmatch(text)), "")
        if isinstance(error, KeyboardInterrupt):
            message = "interrupted"
        elif error.__traceback__ is not None and not (lost or late):
            line = raised_at(error, known=known)
            message += f" ({line})" if line is not None and str(line) not in message else ""
        return cls(
            rank=rank,
            message=printable(" ".join(message.split())),
            details="".join(traceback.format_exception(error)),
            exit_code=1 if is_trouble(error) else getattr(error, "exit_code", 1),
            secondary=isinstance(error, PeerFailed) or lost,
            time=time.time(),
            permanent=is_permanent(error),
        )

    def leave(self, folder: str | os.PathLike[str]) -> None:
        """Writes the report atomically into the supervisor's folder."""
        files.replace_file(Path(folder) / f"rank-{self.rank}.json", json.dumps(asdict(self)).encode())

    def keep(self, folder: Path) -> None:
        """Appends the traceback to `failures/rank-N.txt` in the run's folder, if that can be written."""
        path = folder / FAILURES / f"rank-{self.rank}.txt"
        when = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(self.time))
        title = f"{TITLE}{when}, process {os.getpid()} on {socket.gethostname()}: {self.message}"
        with contextlib.suppress(OSError):
            files.make_own_folder(path.parent)
            earlier = files.read_file(path).decode(errors="replace")[-MOST_KEPT:] if path.exists() else ""
            files.replace_file(path, f"{earlier}{title}\n{self.details[-MOST_KEPT:]}\n".encode(errors="replace"))


def keep_failure(folder: Path, error: BaseException, rank: int) -> None:
    """Keeps the traceback in the run's folder, once, unless the folder is another run's, or the call is wrong."""
    if not isinstance(error, (UsageError, CheckpointBusy)) and not getattr(error, _KEPT, False):
        FailureReport.of(error, rank).keep(folder)
        keep_console(folder)
        with contextlib.suppress(AttributeError):  # a class with slots
            setattr(error, _KEPT, True)


def kept_failures(folder: Path, since: float = 0.0) -> dict[str, str]:
    """The last failure of each rank in the run's folder, by its file, after this time (seconds since 1970): a line that
    says what and when, and the traceback."""
    found = {}
    for path in files.files_in(folder / FAILURES, "rank-*.txt"):
        with contextlib.suppress(FileRefused):
            _, title, last = f"\n{files.read_file(path).decode(errors='replace')}".rpartition(f"\n{TITLE}")
            if title and path.stat().st_mtime > since:
                found[f"{FAILURES}/{path.name}"] = last
    return found


def _without_traceback(text: str) -> str:
    """A DataLoader worker's message without its traceback: the worker, and the error."""
    first, worker, trace = text.partition("\nOriginal Traceback (most recent call last):\n")
    return f"{first.rstrip('.')}: {trace.strip().splitlines()[-1]}" if worker and trace.strip() else text


def is_permanent(error: BaseException) -> bool:
    """Whether the same call would fail in the same way."""
    return isinstance(error, _PERMANENT) and not isinstance(error, DataWorkerLost) and not is_trouble(error)


def describe_lost_peer(text: str, who: str = "another rank") -> str:
    """Explains gloo's message about another rank, without the line of its source: the connection is lost, or was silent
    for the time limit of collectives, which also counts time in which the job was suspended."""
    late = TIMED_OUT.search(text)
    if late is not None:
        return (
            f"a collective has waited for another rank for {int(late[1]) / 1000:g} s, the limit: that rank hangs, or "
            "the job was suspended for longer than that in the middle of the collective; start the run again to resume "
            "from its last checkpoint"
        )
    plain = re.sub(r"\[\S*/(\S+?)\.cc:\d+\]\s*", "", " ".join(text.split()))
    return (
        f"the connection to {who} is lost: {plain}; that rank has ended, or its machine or network has failed: "
        "look at its output"
    )


def is_lost_peer(error: BaseException | None) -> bool:
    """Whether the error, or one of its causes, is a lost connection to another rank."""
    texts = [str(each) for each in causes(error) if isinstance(each, RuntimeError)]
    return any(sign in text for text in texts for sign in PEER_LOST)


def read_failure_reports(folder: str | os.PathLike[str]) -> list[FailureReport]:
    """The ranks' reports: causes before consequences, earlier before later."""
    failures = [FailureReport(**json.loads(path.read_text())) for path in Path(folder).glob("rank-*.json")]
    return sorted(failures, key=lambda failure: (failure.secondary, failure.time))


def late(what: str, timeout: float, setting: str = "save_timeout") -> str:
    """The message for something that has not happened within `timeout` seconds, which the user sets by `setting`."""
    return (
        f"{what} within {timeout:g} s ({setting}); look at what that rank's threads are doing, whose stacks are on its "
        f"standard error, or raise {setting}"
    )


def describe_error(error: BaseException) -> str:
    """The error's message; for an OSError the system's message, the file and what to do."""
    if isinstance(error, OSError) and error.strerror:
        return with_advice(f"{error.strerror}: {error.filename}" if error.filename else error.strerror, error)
    return f"{error}" if isinstance(error, StepmarkError) else printable(f"{type(error).__name__}: {error}")


_PACKAGE = str(Path(__file__).resolve().parents[1])
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_SITE = re.compile(r".*/(?:site|dist)-packages/")
_TYPED = ("<stdin>", "<string>", "<ipython")  # code without a file that a user has written
_TOLD = re.compile(r'^\s+File "(.+)", line (\d+), in (.+)$')


class Line(NamedTuple):
    file: str
    line: int
    function: str

    @property
    def of_package(self) -> bool:
        return self.file.startswith(f"{_PACKAGE}/")

    @property
    def of_library(self) -> bool:
        made = self.function.startswith("__")  # by dataclasses, whose generated code is named <string> too
        unwritten = self.file.startswith("<") and (made or not self.file.startswith(_TYPED))
        return unwritten or self.file.startswith(_INSTALLED) or _SITE.match(self.file) is not None

    @property
    def of_torch(self) -> bool:
        """Or of Python itself."""
        return "/site-packages/torch/" in self.file or not _SITE.match(self.file)

    def __str__(self) -> str:
        file = Path(_SITE.sub("", self.file))
        shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
        return f"{shown}, line {self.line}, in {self.function}"


def raised_at(error: BaseException, *, known: bool) -> Line | None:
    """The line that the error came from: the last line of the user's code that this package has called, directly or
    through a library. If there is none: None for errors whose message is meant for users (`known`); for others the last
    line outside of this package and torch, or outside of this package, or in it."""
    error = causes(error)[-1]
    lines = _told(error) or [Line(*frame[:3]) for frame in traceback.extract_tb(error.__traceback__)]
    first = next((index for index, line in enumerate(lines) if line.of_package), 0)
    called = [line for line in lines[first:] if not line.of_package]
    kinds = [[line for line in called if not line.of_library]]
    kinds += [] if known else [[line for line in called if not line.of_torch], called, lines]
    return next((found[-1] for found in kinds if found), None)


def _told(error: BaseException) -> list[Line]:
    """The lines of the first traceback, the cause of the others, that a data worker's error contains as text."""
    found: list[Line] = []
    for text in "\n".join([str(error), *getattr(error, "__notes__", ())]).splitlines():
        match = _TOLD.match(text)
        if match is not None:
            found.append(Line(match[1], int(match[2]), match[3]))
        elif found and not text.startswith(" "):
            break
    return found
