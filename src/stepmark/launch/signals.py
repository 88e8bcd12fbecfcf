"""Hearing of a signal at once, whatever the main thread is doing.

Python runs signal handlers in the main thread between bytecodes: not while a graph is compiled or a collective waits.
The interpreter's wake-up descriptor is written from the C handler itself, and a thread that reads its other end knows
at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

STOPPING = (signal.SIGTERM, signal.SIGUSR1)  # spot instances, Slurm and launchers send these
INTERRUPTED = 75  # exit code: ended by a signal, and can be resumed


_listening = 0  # how many listen to the wake-up descriptor of this process, one inside the other


class SignalNotice:
    """While it is open, SIGTERM and SIGUSR1 to this process are noted and do nothing else."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        self._handlers: dict[int, Any] = {}
        self._wakeup = -1

    def open(self) -> bool:
        """Begins to listen; False where that cannot be done, because this is not the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return False
        global _listening
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        _listening += 1
        self._handlers = {number: signal.signal(number, _nothing) for number in STOPPING}
        return True

    def wait(self, seconds: float) -> str | None:
        """The name of a signal that came, waiting at most so long for one. For one thread of the program's."""
        ready = select.poll()  # select() takes no descriptor above 1023
        ready.register(self._reader, select.POLLIN)
        if not ready.poll(seconds * 1000):
            return None
        try:
            came = self._reader.recv(4096)
        except BlockingIOError:
            return None
        if self._wakeup != -1:
            with contextlib.suppress(OSError):  # whoever listened before may be gone, or have enough to read
                os.write(self._wakeup, came)
        return next((number.name for number in STOPPING if number in came), None)

    def close(self) -> None:
        """Gives the signals back to whoever had them. In the main thread, when nobody waits any more."""
        global _listening
        if self._handlers:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._handlers = {}
            signal.set_wakeup_fd(self._wakeup)
            _listening -= 1
        self._reader.close()
        self._writer.close()


def _nothing(_: int, __: FrameType | None) -> None:
    pass


def _let_go_of_wakeup() -> None:
    """In a forked process: the descriptor is its parent's, who would hear of signals that are not for it."""
    if _listening:
        with contextlib.suppress(ValueError):  # not in the main thread, which is the one that handles signals
            signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_let_go_of_wakeup)


@contextlib.contextmanager
def hearing(heard: Callable[[int], None]) -> Iterator[None]:
    """Meanwhile `heard` is called, in a thread of its own, with each of the signals in STOPPING that comes, whoever
    handles it. For the main thread."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    global _listening
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    _listening += 1

    def listen() -> None:
        while came := reader.recv(4096):
            for number in STOPPING:
                if number in came:
                    heard(number)
        reader.close()

    threading.Thread(target=listen, name="stepmark-signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        _listening -= 1
        writer.close()
