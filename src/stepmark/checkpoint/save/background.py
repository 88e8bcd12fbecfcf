"""Background threads: they write the save in progress, and then delete old checkpoints."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.checkpoint_folders import checkpoints, remove_temporary
from stepmark.checkpoint.operation import Operation, SaveHandle
from stepmark.checkpoint.save.delete_old_checkpoints import CheckpointCleaner
from stepmark.checkpoint.save.write import SaveWriter
from stepmark.errors import CheckpointError
from stepmark.liveness.failure_report import describe_error
from stepmark.liveness.running_time import running_time

FAREWELL = 10.0  # seconds that rank 0 gives the others to read a save's outcome

logger = logging.getLogger("stepmark")


class Background:
    """The threads of one rank, at most one of which writes a save."""

    def __init__(self, rank: int, size: int, timeout: float, cleaner: CheckpointCleaner) -> None:
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._cleaner = cleaner
        self._in_progress: SaveHandle | None = None
        self._aftermaths: list[SaveHandle] = []  # deletions of old checkpoints whose outcome was not reported yet
        self._left: set[Path] = set()  # temporary folders of failed saves, on the first rank that sees them
        self._threads: list[threading.Thread] = []

    def begin(self, writer: SaveWriter, memory: memoryview, readers: set[SaveHandle]) -> None:
        """Starts to write a save, which is among the readers of its memory until that ends. Wait for the one before."""
        handle = writer.operation.handle
        assert handle is not None
        self._in_progress = handle
        readers.add(handle)
        self._spawn(self._finish, writer, memory, handle, readers)

    def check(self) -> None:
        """Raises the error of what has failed."""
        for handle in (self._in_progress, *self._aftermaths):
            if handle is not None and handle.failed():
                self.wait()

    def wait(self) -> None:
        """Returns when no save is being written. Raises the error of what has failed."""
        in_progress = self._in_progress
        if in_progress is not None:
            in_progress.wait()  # if this is interrupted, it is still in progress
            self._in_progress = None
            if not in_progress.collected.is_set():  # else the caller already has the outcome
                in_progress.result()
        for aftermath in [handle for handle in self._aftermaths if handle.done()]:
            self._aftermaths.remove(aftermath)
            aftermath.result()

    def join(self) -> bool:
        """Waits a moment for all threads to end; returns whether they have."""
        for aftermath in list(self._aftermaths):
            aftermath.wait()  # deleting may take long, and has a deadline
        until = time.monotonic() + FAREWELL + 1
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        try:
            for aftermath in [handle for handle in self._aftermaths if handle.done()]:
                aftermath.result()
        except Exception as error:  # every save is safe, and no later call could raise it
            logger.error("%s", describe_error(error))
        return not any(thread.is_alive() for thread in self._threads)

    def tidy(self) -> None:
        """Removes what failed saves left in this folder, once all ranks have started another one, so that a full disk
        does not stay full. It does not wait for all ranks to report completion, since a full disk prevents that."""
        for temporary in list(self._left):
            self._discard(temporary)

    def make_room(self, folder: Path, needed: int, save: str) -> None:
        """On rank 0: where fewer than `needed` bytes are free, deletes what the policies do not keep, as they may be
        stricter than those of the run that saved it. What they keep stays, the newest checkpoint included."""
        if shutil.disk_usage(folder).free < needed and (existing := checkpoints(folder)):
            self._cleaner.after(existing[0], save)

    def _discard(self, temporary: Path) -> None:
        try:
            remove_temporary(temporary)
        except OSError as error:
            logger.warning("cannot remove the files of a failed save: %s", describe_error(error))
        finally:
            self._left.discard(temporary)

    def leave(self, operation: Operation) -> None:
        """Leaves the status store of a save or restore that has ended; see `_farewell`."""
        self._spawn(self._farewell, operation)

    def _spawn(self, target: Callable[..., None], *arguments: Any) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        # A daemon: closing waits for it, also at exit, and a thread that is stuck for good must not prevent that.
        thread = threading.Thread(target=target, args=arguments, name="stepmark-save", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the limit of threads, or the interpreter is ending
            logger.warning("cannot start a thread (%s): continuing without it", error)
            target(*arguments)
        else:
            self._threads.append(thread)

    def _finish(self, writer: SaveWriter, memory: memoryview, handle: SaveHandle, readers: set[SaveHandle]) -> None:
        time.sleep(0.001)  # the caller goes on first: else it waits for the interpreter's lock, for 5 ms at a time
        try:
            path, size = writer.run(memory)
        except BaseException as error:
            writer.operation.fail_behind(error)
            readers.discard(handle)
            if writer.division is not None:  # rank 0 may see another folder than this one
                self._left.add(writer.temporary)
        else:
            readers.discard(handle)
            handle.succeed(path, size)
            if self._rank == 0:
                self._retain(path, writer)
        self._farewell(writer.operation)

    def _retain(self, newest: Path, writer: SaveWriter) -> None:
        """Deletes what no policy keeps, now that `newest` is committed; an error is raised by the next call."""
        step, save = writer.commit.manifest.step, writer.commit.manifest.save
        handle = SaveHandle(step)
        self._aftermaths.append(handle)
        what = f"deleting old checkpoints after step {step}"
        operation = Operation(what, f"{what} has failed", writer.operation.board, self._timeout, handle)
        try:
            operation.enter("deleting")
            self._cleaner.after(newest, save)
            operation.leave()
            handle.succeed(newest)
        except OSError as error:
            problem = CheckpointError(f"{operation.failure}: {describe_error(error)}")
            problem.__cause__ = error
            handle.fail(problem)
        except BaseException as error:
            handle.fail(error)
        finally:
            operation.stop()

    def _farewell(self, operation: Operation) -> None:
        """Leaves a status store. When all ranks have, rank 0 removes it, and what a failed save left. Where a rank is
        late or gone, the others may need to read what it was doing: both stay until the folder is released."""
        board, temporary = operation.board, operation.folder
        board.leave()
        if self._rank != 0 or operation.timed_out():
            return
        if temporary is not None:
            self._left.add(temporary)
        try:
            gone = board.close(range(1, self._size), running_time() + min(self._timeout, FAREWELL))
            if gone and temporary in self._left:
                self._discard(temporary)
        except OSError as error:
            logger.warning("cannot remove the files of a failed save: %s", describe_error(error))
