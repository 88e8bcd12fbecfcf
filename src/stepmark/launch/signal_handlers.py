"""Handlers of the signals that stop a run, where nobody listens to them: at the start and at the end of a process.

At the start, KeyboardInterrupt in the middle of an import would be an error of that import. At the end, Python gives
signals their default actions before the interpreter has ended, seconds before with the libraries of training. Signals
that are ignored remain so.
"""

from __future__ import annotations

import atexit
import signal
import threading
import time
from types import FrameType
from typing import Any

# What spot instances, Slurm, launchers and Ctrl-C send, and a terminal or connection that is closed.
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
IGNORABLE = (signal.SIGINT, signal.SIGHUP)  # stay ignored where they are: a shell's background job, nohup
_until_exit = False


def postpone_keyboard_interrupts() -> None:
    """Gives SIGINT its default action, which ends the process, where it would raise KeyboardInterrupt in the middle of
    an import. `raise_keyboard_interrupts` or a `listening` block is to follow."""
    if threading.current_thread() is not threading.main_thread():  # which alone handles signals
        return
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # the supervisor starts ranks with it blocked


def raise_keyboard_interrupts() -> None:
    """Makes SIGINT raise KeyboardInterrupt, as usual in Python, where `postpone_keyboard_interrupts` has changed it."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def keep_exit_code() -> None:
    """For the entry point of a program: where a `listening` block ends, the program ends, and signals are ignored."""
    global _until_exit
    _until_exit = True


def ignore_until_exit() -> None:
    """From now on, signals no longer change this process's exit code."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


def handler_afterwards(earlier: Any, concluded_until: float | None = None) -> Any:
    """The handler for a signal after the block in which it was heard; `earlier` is the one from before."""
    if _until_exit:
        return signal.SIG_IGN
    if earlier == signal.SIG_DFL and concluded_until is not None:
        return _IgnoreFor(concluded_until)
    return earlier


def without_postponement(handler: Any) -> Any:
    """The handler that the program itself has installed: the default action where a run that was interrupted has
    postponed that."""
    return signal.SIG_DFL if isinstance(handler, _IgnoreFor) else handler


class _IgnoreFor:
    """A handler that does nothing until a time (time.monotonic), and then what the signal does by default."""

    def __init__(self, until: float) -> None:
        self._until = until

    def __call__(self, number: int, _: FrameType | None) -> None:
        if time.monotonic() > self._until:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def keep_exit_code_at_exit() -> None:
    """From the interpreter's own end on, signals no longer change the exit code."""
    atexit.unregister(_ignore_at_exit)
    atexit.register(_ignore_at_exit)


def _ignore_at_exit() -> None:
    """Only the interpreter's own end is left of the program. Handlers that it has installed remain."""
    for number in STOPPING:
        handler = signal.getsignal(number)
        if handler in (signal.SIG_DFL, signal.default_int_handler) or isinstance(handler, _IgnoreFor):
            signal.signal(number, signal.SIG_IGN)
