"""Serializes the calls of a Checkpointer: one thread at a time, in one process."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

from stepmark.errors import UsageError
from stepmark.liveness.progress import SAVE, staying


class CallGuard:
    """Serializes the calls of one object by several threads, and refuses those of forked processes."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process = 0

    def bind(self) -> None:
        """From now on, only this process may call."""
        self._process = os.getpid()

    def elsewhere(self) -> bool:
        """Whether this process was forked from the one that may call, and so lacks its threads."""
        return self._process not in (0, os.getpid())

    @contextmanager
    def one(self) -> Iterator[None]:
        """One call, outside of torch's inference mode, so that new tensors can be trained.

        Raises UsageError in a forked process.
        """
        if self.elsewhere():
            raise UsageError(
                f"this Checkpointer belongs to process {self._process}, from which process {os.getpid()} was forked: "
                "save and restore there, or create another Checkpointer for another folder"
            )
        with staying(SAVE), self._lock, torch.inference_mode(False):
            yield


class _GuardedObject(Protocol):
    _calls: CallGuard


_S = TypeVar("_S", bound=_GuardedObject)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def one_at_a_time(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """Runs a method as one of its object's `_calls`."""

    @functools.wraps(method)
    def called(self: _S, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._calls.one():
            return method(self, *args, **kwargs)

    return called
