"""Makes the k-th call of a process that changes the file system fail, in the module that makes all of them.

`Faults` replaces `os` in stepmark.filesystem.files, so a real save makes the calls.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stepmark.filesystem import files

KINDS = ("killed-before", "killed-after", "full", "io-error", "short-write", "power-loss")
TAKES_SPACE = ("creat", "pwrite", "mkdir", "rename", "fsync")


class Faults:
    """The system's calls, counted; call number `at` (from 1 on; 0: none) fails as `kind` says.

    full: it and all later ones that take space. io-error: this one. short-write: it writes half. power-loss: it
    happens, and then every process that shares the journal ends at once. `journal`, if there is one, gets every
    change, in order.
    """

    def __init__(self, kind: str = "", at: int = 0, journal: Path | None = None, *, exchange: bool = True) -> None:
        self.count = 0
        self._kind = kind
        self._at = at
        self._journal = journal
        self._exchange = exchange
        self._lock = threading.RLock()

    def install(self) -> None:
        """Installs itself in this process for good."""
        files.os = self  # type: ignore[assignment]
        self._real_exchange = files._renameat2
        files._renameat2 = self._renameat2

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)  # calls that change nothing

    @property
    def reached(self) -> bool:
        """Whether there was a call of that number."""
        return 0 < self._at <= self.count

    def _call(self, name: str, call: Callable[[], Any], *records: tuple[Any, ...]) -> Any:
        with self._lock, self._ordered():
            self.count += 1
            now = self.count == self._at
            if now and self._kind == "killed-before":
                os.kill(os.getpid(), signal.SIGKILL)
            if self._kind == "full" and 0 < self._at <= self.count and name in TAKES_SPACE:
                raise OSError(errno.ENOSPC, "No space left on device")
            if now and self._kind == "io-error":
                raise OSError(errno.EIO, "Input/output error")
            result = call()
            for record in records:
                self._note(record)
            if now and self._kind == "power-loss":
                assert self._journal is not None
                self._journal.with_suffix(".off").touch()
            if now and self._kind in ("power-loss", "killed-after"):
                os.kill(os.getpid(), signal.SIGKILL)
            return result

    @contextlib.contextmanager
    def _ordered(self) -> Iterator[None]:
        """One call at a time of all processes that share the journal; none once the power is off."""
        if self._journal is None:
            yield
            return
        with self._journal.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self._journal.with_suffix(".off").exists():
                os.kill(os.getpid(), signal.SIGKILL)
            yield

    def _note(self, record: tuple[Any, ...]) -> None:
        if self._journal is not None:
            with self._journal.open("ab") as journal:
                journal.write(pickle.dumps(record))

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        name = "creat" if flags & os.O_CREAT else "open"
        records = [("create", str(path))] if flags & os.O_CREAT else []
        return int(self._call(name, lambda: os.open(path, flags, mode), *records))

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        with self._lock:
            if self._kind == "short-write" and self.count + 1 == self._at:
                data = data[: (len(data) + 1) // 2]
            return int(self._call("pwrite", lambda: os.pwrite(descriptor, data, offset)))

    def fsync(self, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")

        def call() -> None:
            os.fsync(descriptor)
            folder = os.path.isdir(path)
            self._note(("sync_folder", path) if folder else ("sync", path, Path(path).read_bytes()))

        self._call("fsync", call if self._journal is not None else lambda: os.fsync(descriptor))

    def close(self, descriptor: int) -> None:
        try:
            self._call("close", lambda: None)
        finally:
            os.close(descriptor)

    def chmod(self, path: Any, mode: int) -> None:
        self._call("chmod", lambda: os.chmod(path, mode))

    def utime(self, path: Any) -> None:
        self._call("utime", lambda: os.utime(path))

    def mkdir(self, path: Any) -> None:
        self._call("mkdir", lambda: os.mkdir(path), ("mkdir", str(path)))

    def rename(self, source: Any, target: Any) -> None:
        self._call("rename", lambda: os.rename(source, target), ("rename", str(source), str(target)))

    def unlink(self, path: Any) -> None:
        self._call("unlink", lambda: os.unlink(path), ("remove", str(path)))

    def rmdir(self, path: Any) -> None:
        self._call("rmdir", lambda: os.rmdir(path), ("remove", str(path)))

    def _renameat2(self, one: Path, other: Path) -> int:
        if not self._exchange:
            return errno.ENOSYS

        def call() -> None:
            code = self._real_exchange(one, other)
            if code:
                raise OSError(code, os.strerror(code))

        try:
            self._call("rename", call, ("exchange", str(one), str(other)))
        except OSError as error:
            return error.errno or errno.EIO
        return 0


def read_journal(path: Path) -> Iterator[tuple[Any, ...]]:
    """The changes in the journal."""
    if not path.exists():
        return
    with path.open("rb") as journal:
        while True:
            try:
                yield pickle.load(journal)
            except EOFError:
                return
