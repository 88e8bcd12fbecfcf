"""Receives SIGTERM and SIGUSR1 immediately, whatever the main thread is doing.

Python runs signal handlers in the main thread between bytecodes: not while a graph is compiled or a collective waits.
The C handler, however, writes the signal's number to the interpreter's wake-up descriptor immediately, and a thread
that reads the other end receives it. A process has one such descriptor, so it has one listener: `listening` blocks
nest, and a signal goes to the innermost one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

STOPPING = (signal.SIGTERM, signal.SIGUSR1)  # spot instances, Slurm and launchers send these
INTERRUPTED = 75  # exit code: ended by a signal, and can be resumed
_FLUSH = 0  # not a signal's number
_FLUSH_SECONDS = 1.0
SignalHandler = Callable[[signal.Signals], None]


class RunInterrupted(SystemExit):
    """A signal ended the run, which can be resumed. Uncaught, it ends the program with exit code 75.

    `recorded`: the reason was printed and is in the run's status.
    """

    def __init__(self, reason: str, *, recorded: bool = False) -> None:
        super().__init__(INTERRUPTED)
        self.reason = reason
        self.recorded = recorded


def _ignore(_: signal.Signals) -> None:
    pass


@contextlib.contextmanager
def listening(heard: SignalHandler, in_main_thread: SignalHandler = _ignore) -> Iterator[bool]:
    """Inside the block, SIGTERM and SIGUSR1 to this process call `heard` in the listener's thread, immediately, and
    `in_main_thread` in the main thread, as soon as Python can run a handler there. They do nothing else.

    Yields whether signals are received: the outermost block has to be entered in the main thread.
    """
    global _listener
    outermost = _listener is None
    if outermost:
        if threading.current_thread() is not threading.main_thread():
            yield False
            return
        _listener = _Listener()
    listener, subscriber = _listener, (heard, in_main_thread)
    assert listener is not None
    listener.subscribers.append(subscriber)
    try:
        if outermost:
            listener.open()
        yield True
    finally:
        if outermost:
            listener.restore_handlers()
        listener.flush()  # a signal that arrived inside the block belongs to its subscriber
        listener.subscribers.remove(subscriber)
        if outermost:
            _listener = None
            listener.close()


class _Listener:
    """The thread that reads the wake-up descriptor, and the handlers of STOPPING in the main thread."""

    def __init__(self) -> None:
        self.subscribers: list[tuple[SignalHandler, SignalHandler]] = []
        self._process = os.getpid()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._flushed = threading.Event()
        self._earlier_descriptor = -1
        self._earlier_handlers: dict[int, Any] = {}
        self._thread = threading.Thread(target=self._read, name="stepmark-signals", daemon=True)

    def open(self) -> None:
        self._thread.start()
        self._earlier_descriptor = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in STOPPING:
            self._earlier_handlers[number] = signal.signal(number, self._handle)

    def restore_handlers(self) -> None:
        """Gives the signals back to the handlers that were installed before."""
        for number, handler in self._earlier_handlers.items():
            signal.signal(number, handler)
        if self._earlier_handlers:
            signal.set_wakeup_fd(self._earlier_descriptor)

    def flush(self) -> None:
        """Returns when the signals received so far were delivered."""
        if os.getpid() != self._process:  # a forked process, which has no such thread
            return
        self._flushed.clear()
        with contextlib.suppress(OSError):
            self._writer.send(bytes([_FLUSH]))
            self._flushed.wait(_FLUSH_SECONDS)

    def close(self) -> None:
        """Ends the thread."""
        self._writer.close()

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.subscribers:
            self.subscribers[-1][1](signal.Signals(number))

    def _read(self) -> None:
        with self._reader:
            while received := self._reader.recv(4096):
                if self._earlier_descriptor != -1:
                    with contextlib.suppress(OSError):  # its reader may be gone, or its buffer full
                        os.write(self._earlier_descriptor, received)
                for number in received:
                    self._deliver(number)

    def _deliver(self, number: int) -> None:
        if number == _FLUSH:
            self._flushed.set()
        elif number in STOPPING and self.subscribers:
            self.subscribers[-1][0](signal.Signals(number))


_listener: _Listener | None = None


def _detach_from_parent() -> None:
    """In a forked process: the descriptor is the parent's, which would receive signals that are not for it."""
    global _listener
    if _listener is not None:
        _listener = None
        with contextlib.suppress(ValueError):  # not in the main thread, which is the one that handles signals
            signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_detach_from_parent)
