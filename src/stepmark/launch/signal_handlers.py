"""Handlers of the signals that stop a run while nothing listens for them: at the start and at the end of a process.

At the start, a KeyboardInterrupt in the middle of an import would look like an error of that import. At the end, Python
restores the signals' default actions before the interpreter has exited, which takes seconds with the libraries of
training. Ignored signals stay ignored.
"""

from __future__ import annotations

import atexit
import signal
import threading
import time
from types import FrameType
from typing import Any

# Sent by spot instances, Slurm, launchers, Ctrl-C, and a terminal or connection that is closed.
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
IGNORABLE = (signal.SIGINT, signal.SIGHUP)  # stay ignored where they are: a shell's background job, nohup
_until_exit = False


def postpone_keyboard_interrupts() -> None:
    """Gives SIGINT its default action, which ends the process, instead of raising KeyboardInterrupt in the middle of an
    import. `raise_keyboard_interrupts` or a `listening` block has to follow."""
    if threading.current_thread() is not threading.main_thread():  # which alone handles signals
        return
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # the supervisor starts ranks with it blocked


def raise_keyboard_interrupts() -> None:
    """Makes SIGINT raise KeyboardInterrupt again, if `postpone_keyboard_interrupts` has changed that."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def keep_exit_code() -> None:
    """For a program's entry point: the program exits after its `listening` block, and then ignores signals."""
    global _until_exit
    _until_exit = True


def ignore_until_exit() -> None:
    """From now on, signals do not change this process's exit code."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


def handler_afterwards(earlier: Any, concluded_until: float | None = None) -> Any:
    """The handler for a signal after a `listening` block; `earlier` is the one from before the block."""
    if _until_exit:
        return signal.SIG_IGN
    if earlier == signal.SIG_DFL and concluded_until is not None:
        return _IgnoreFor(concluded_until)
    return earlier


def without_postponement(handler: Any) -> Any:
    """The handler that the program has installed: the default action if an interrupted run has postponed that."""
    return signal.SIG_DFL if isinstance(handler, _IgnoreFor) else handler


class _IgnoreFor:
    """A handler that ignores the signal until a time (time.monotonic), and then takes its default action."""

    def __init__(self, until: float) -> None:
        self._until = until

    def __call__(self, number: int, _: FrameType | None) -> None:
        if time.monotonic() > self._until:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def keep_exit_code_at_exit() -> None:
    """While the interpreter exits, signals do not change the exit code."""
    atexit.unregister(_ignore_at_exit)
    atexit.register(_ignore_at_exit)


def _ignore_at_exit() -> None:
    """Ignores signals while the interpreter exits. Handlers that the program has installed stay."""
    for number in STOPPING:
        handler = signal.getsignal(number)
        if handler in (signal.SIG_DFL, signal.default_int_handler) or isinstance(handler, _IgnoreFor):
            signal.signal(number, signal.SIG_IGN)
