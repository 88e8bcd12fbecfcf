"""Functions that are held back for a while."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from stepmark.checkpoint.save.snapshot import PendingCopies


class Gate:
    """Holds the calls of `owner`'s function `name` until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self._open = threading.Event()
        function = getattr(owner, name)

        def hold(*arguments: Any, **options: Any) -> Any:
            self.seen(*arguments)
            assert self._open.wait(30)
            return function(*arguments, **options)

        patch.setattr(owner, name, hold)

    def seen(self, *arguments: Any) -> None:
        """A call has begun."""

    def open(self) -> None:
        self._open.set()


class CopyGate(Gate):
    """Keeps saves from making the copies that can wait; says how many there are."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.pending: list[int] = []
        super().__init__(patch, PendingCopies, "run")

    def seen(self, *arguments: Any) -> None:
        self.pending.append(len(arguments[0]._copies))
