"""Who may call the engine: one thread at a time, of one process."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

from stepmark.errors import UsageError


class CallGuard:
    """The calls of one object. What several threads ask for happens one after the other."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process = 0

    def bind(self) -> None:
        """From now on this process alone may call; see `elsewhere`."""
        self._process = os.getpid()

    def elsewhere(self) -> bool:
        """Whether this is a process that was forked from the one that may call: it has none of its threads."""
        return self._process not in (0, os.getpid())

    @contextmanager
    def one(self) -> Iterator[None]:
        """One call. New tensors are made for training, also where the caller is in torch's inference mode.

        Raises UsageError in a forked process.
        """
        if self.elsewhere():
            raise UsageError(
                f"this Checkpointer is that of process {self._process}, which process {os.getpid()} was forked from: "
                "save and restore there, or make another Checkpointer, for another folder"
            )
        with self._lock, torch.inference_mode(False):
            yield


class _GuardedObject(Protocol):
    _calls: CallGuard


_S = TypeVar("_S", bound=_GuardedObject)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def one_at_a_time(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """A method that is one of its object's `_calls`."""

    @functools.wraps(method)
    def called(self: _S, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._calls.one():
            return method(self, *args, **kwargs)

    return called
