"""Ends a process at a signal when there is nothing to save: before and after training, and in evaluations.

The main thread raises RunInterrupted, so that files and claims are released, except while it imports a module: an
exception would leave modules half initialized, or get lost in a callback of the import system. In that case, and if the
main thread does not react in time or the exception is swallowed, another thread ends the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from traceback import walk_stack

from stepmark.launch.signal_listener import RunInterrupted, listening
from stepmark.liveness.process_exit import end_interrupted

PATIENCE = 2.0  # seconds for the main thread to react to a signal
UNWINDING = 10.0  # seconds for it to leave the block after that
RECORDING = 10.0  # seconds for recording: heartbeats tell whether another run owns the folder
_IMPORTING = "<frozen importlib._bootstrap>"


@contextlib.contextmanager
def ending_at_signals(
    what: str, record: Callable[[str], None], is_done: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Inside the block, a signal ends the process with exit code 75, whatever else happens afterwards.

    Args:
        what: What the process is doing, for the reason: `SIGTERM: <what>`.
        record: Called with the reason, perhaps in another thread.
        is_done: Whether the work is complete, in which case signals are ignored.
    """
    ending = _Interruption(what, record, is_done)
    with listening(ending.heard, ending.in_main_thread):
        try:
            yield
        except RunInterrupted:
            raise
        except BaseException as error:
            if ending.reason is not None:  # the exception may have been replaced by another one
                raise RunInterrupted(ending.reason, recorded=True) from error
            raise
        finally:
            ending.unwound.set()
        if ending.reason is not None:  # it was swallowed
            raise RunInterrupted(ending.reason, recorded=True)


class _Interruption:
    def __init__(self, what: str, record: Callable[[str], None], is_done: Callable[[], bool]) -> None:
        self.reason: str | None = None
        self.unwound = threading.Event()
        self._what, self._write, self._is_done = what, record, is_done
        self._recording = threading.Lock()
        self._recorded = False
        self._process = os.getpid()
        self._answered = threading.Event()
        self._raises = False
        self._ignored = False

    def in_main_thread(self, number: signal.Signals) -> None:
        if os.getpid() != self._process:  # a forked process, which is not part of the run
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if self._answered.is_set():
            return
        self._ignored = self._is_done()
        if self._ignored:
            self._answered.set()
            return
        self.reason = self._reason(number)
        self._raises = all(frame.f_code.co_filename != _IMPORTING for frame, _ in walk_stack(sys._getframe()))
        self._answered.set()
        if self._raises:
            self._record(self.reason)
            raise RunInterrupted(self.reason, recorded=True)

    def heard(self, number: signal.Signals) -> None:
        """In the listener's thread, which has to be free for the next signal."""
        threading.Thread(target=self._see_it_end, args=(number,), name="stepmark-ending", daemon=True).start()

    def _see_it_end(self, number: signal.Signals) -> None:
        answered = self._answered.wait(PATIENCE)
        if self._ignored or (answered and self._raises and self.unwound.wait(UNWINDING)):
            return
        end_interrupted(self._reason(number), self._record, RECORDING)

    def _record(self, reason: str) -> None:
        """Records the reason once: the main thread may react when the other one has just given up waiting."""
        with self._recording:
            if not self._recorded:
                self._write(reason)
            self._recorded = True

    def _reason(self, number: signal.Signals) -> str:
        return self.reason or f"{number.name}: {self._what}"
