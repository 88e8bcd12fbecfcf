"""Pickles that name classes and functions of torch, written without torch.

What is pickled is plain, or one of the three stand-ins here. Python's own pickler refuses a name that it cannot import.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any


@dataclass(frozen=True)
class Global:
    """A class or function, by its module and name."""

    module: str
    name: str


@dataclass(frozen=True, eq=False)
class Call:
    """What a function returns."""

    function: Global
    arguments: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Instance:
    """An object of a class that is made without arguments, with its state: a dict, or what its class takes."""

    kind: Global
    state: Any


class StandInPickler(pickle._Pickler):
    """Writes a value as pickle.Pickler would, with the things in place of their stand-ins."""

    if TYPE_CHECKING:  # the parts of Python's own pickler in Python
        memo: dict[int, tuple[int, Any]]

        def write(self, data: bytes) -> None: ...

        def get(self, i: int) -> bytes: ...

        def memoize(self, obj: Any) -> None: ...

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self._globals: dict[Global, Global] = {}

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        """Writes a value; one that was written before is referred to."""
        kind = type(obj)
        if kind is Global:
            obj = self._globals.setdefault(obj, obj)  # equal ones are one thing
        if kind in (Global, Call, Instance) and id(obj) in self.memo:
            self.write(self.get(self.memo[id(obj)][0]))
        elif kind is Global:
            self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
            self.memoize(obj)
        elif kind is Call:
            self.save(obj.function)
            self.save(obj.arguments)
            self.write(pickle.REDUCE)
            self.memoize(obj)
        elif kind is Instance:
            self.save(obj.kind)
            self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
            self.memoize(obj)
            self.save(obj.state)
            self.write(pickle.BUILD)
        else:
            super().save(obj, save_persistent_id)  # type: ignore[misc]


def dumps(value: Any) -> bytes:
    """The pickle of a value."""
    file = io.BytesIO()
    StandInPickler(file).dump(value)
    return file.getvalue()
