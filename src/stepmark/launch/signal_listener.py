"""Receives SIGTERM, SIGUSR1, SIGHUP and SIGINT immediately, whatever the main thread is doing.

Python runs signal handlers in the main thread between bytecodes: not while a graph compiles or a collective waits. The
C handler, however, immediately writes the signal's number to the interpreter's wake-up descriptor, whose other end a
thread reads. A process has one such descriptor, and therefore one listener: `listening` blocks nest, and a signal goes
to the innermost one.

The kernel delivers a signal of the process to the main thread only, where even the C handler has to wait while that
thread is in an uninterruptible wait, for a file server or a driver. So the listener's thread takes signals that stay
pending. No thread blocks signals, since processes that the program starts would inherit that.

A second SIGINT (Ctrl-C pressed again) ends the process at once. Once a signal has ended the run, further ones do not
change the exit code, up to the last instruction of the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from stepmark.launch.signal_handlers import (
    IGNORABLE,
    STOPPING,
    handler_afterwards,
    keep_exit_code_at_exit,
    without_postponement,
)
from stepmark.liveness.process_exit import INTERRUPTED, end_by_signal, leave

SAME_PRESS = 0.2  # seconds within which two SIGINTs are one Ctrl-C, which a parent process may forward as well
_FLUSH = 0  # not a signal's number
_FLUSH_SECONDS = 1.0
_PENDING_SECONDS = 1.0  # after which a signal that the main thread has not taken is the listener's
SignalHandler = Callable[[signal.Signals], None]


class RunInterrupted(SystemExit):
    """A signal ended the run, which can be resumed. Uncaught, it ends the program with exit code 75.

    `recorded`: the reason was printed and is in the run's status.
    """

    def __init__(self, reason: str, *, recorded: bool = False) -> None:
        super().__init__(INTERRUPTED)
        self.reason = reason
        self.recorded = recorded


def how_to_go_on(resume_from_checkpoint: bool | str | None) -> str:
    """What to do after an interruption, by what the run's arguments say."""
    if resume_from_checkpoint is True:
        return "to continue, start the same command again"
    return (
        "to continue, start it again with resume_from_checkpoint: true, in a script train(resume_from_checkpoint=True)"
    )


@contextlib.contextmanager
def listening(heard: SignalHandler, in_main_thread: SignalHandler = lambda number: None) -> Iterator[bool]:
    """Inside the block, the signals STOPPING immediately call `heard` in the listener's thread, and `in_main_thread` in
    the main thread as soon as Python can run a handler there. They have no other effect, except that a second SIGINT
    ends the process.

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
    if not outermost:  # an earlier signal belongs to the outer block, in both threads
        listener.flush()
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


def conclude(seconds: float) -> None:
    """A signal has ended the run: further ones are ignored. If the program has no handlers for them and continues after
    the run, they have their usual effect again after this number of seconds."""
    if _listener is not None:
        _listener.concluded_until = time.monotonic() + seconds


def send_again(number: signal.Signals) -> None:
    """Sends this process a signal again that it has received, for the code after the run; it counts as a first one."""
    if _listener is not None:
        _listener.interrupts = Interrupts()
    os.kill(os.getpid(), number)


class Interrupts:
    """Distinguishes a second Ctrl-C from the first, and from one that arrives twice."""

    def __init__(self) -> None:
        self._first: float | None = None

    def again(self) -> bool:
        """A SIGINT has arrived; returns whether it is a second one."""
        if self._first is None:
            self._first = time.monotonic()
        return time.monotonic() - self._first > SAME_PRESS


def program_handler(number: int) -> Any:
    """The program's handler of a signal outside of all `listening` blocks, as `signal.getsignal` returns it."""
    earlier = {} if _listener is None else _listener.earlier_handlers
    return without_postponement(earlier[number] if number in earlier else signal.getsignal(number))


class _Listener:
    """The thread that reads the wake-up descriptor, and the handlers of STOPPING in the main thread."""

    def __init__(self) -> None:
        self.subscribers: list[tuple[SignalHandler, SignalHandler]] = []
        self.interrupts = Interrupts()
        self.concluded_until: float | None = None
        self._closing = False
        self._process = os.getpid()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._reader.settimeout(_PENDING_SECONDS)
        self._flushed = threading.Event()
        self._earlier_descriptor = -1
        self.earlier_handlers: dict[int, Any] = {}
        self._thread = threading.Thread(target=self._read, name="stepmark-signals", daemon=True)

    def open(self) -> None:
        self._thread.start()
        self._earlier_descriptor = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in STOPPING:
            if number in IGNORABLE and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self.earlier_handlers[number] = signal.signal(number, self._handle)

    def restore_handlers(self) -> None:
        """Gives the signals back to the handlers that were installed before, unless the process is about to end."""
        self._closing = True
        for number, handler in self.earlier_handlers.items():
            signal.signal(number, handler_afterwards(handler, self.concluded_until))
        if self.earlier_handlers:
            signal.set_wakeup_fd(self._earlier_descriptor)
            keep_exit_code_at_exit()

    def flush(self) -> None:
        """Returns once the signals received so far are delivered."""
        if os.getpid() != self._process:  # a forked process, which has no such thread
            return
        self._flushed.clear()
        with contextlib.suppress(OSError):
            self._writer.send(bytes([_FLUSH]))
            self._flushed.wait(_FLUSH_SECONDS)

    def close(self) -> None:
        self._writer.close()

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.subscribers and not self._closing and self.concluded_until is None:
            self.subscribers[-1][1](signal.Signals(number))

    def _read(self) -> None:
        with self._reader:
            while received := self._receive():
                if self._earlier_descriptor != -1:
                    with contextlib.suppress(OSError):  # its reader may be gone, or its buffer full
                        os.write(self._earlier_descriptor, received)
                for number in received:
                    self._deliver(number)

    def _receive(self) -> bytes:
        """The next signal numbers, empty at the end. Takes pending signals into this thread instead."""
        while True:
            with contextlib.suppress(TimeoutError):
                return self._reader.recv(4096)
            taken = signal.sigtimedwait(self.earlier_handlers, 0) if hasattr(signal, "sigtimedwait") else None
            if taken is not None:
                signal.raise_signal(taken.si_signo)  # its C handler writes to the descriptor

    def _deliver(self, number: int) -> None:
        if number == _FLUSH:
            self._flushed.set()
        elif number in self.earlier_handlers:
            if number == signal.SIGINT and self.interrupts.again():
                if self.concluded_until is not None:  # saved, and about to end
                    leave(INTERRUPTED)
                end_by_signal(signal.SIGINT)
            if self.subscribers and self.concluded_until is None:
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
