"""The logs of a run as a list that takes little memory, and trainer_state.json, of which they are the most.

A log is encoded once, whatever the number of saves; those of earlier processes stay as they are in the file.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import operator
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import asdict
from itertools import chain, islice, pairwise, repeat
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerState

BLOCK = 512  # logs that are compressed together: each piece that a thread writes may cost training 5 ms
FEW = 8  # blocks that may be open
_KEY, _END = b'\n  "log_history": [', b"\n  ],\n"  # as transformers indents it
_FIRST, _NEXT = b"\n    ", b",\n    "
_BETWEEN = re.compile(_NEXT + rb"(?=[^ ])")  # two logs: what is inside a log is indented further
_PLAIN = {int, float, str, bool, type(None)}


class LogHistory(list[Any]):
    """A list of logs: blocks of compressed JSON text, and behind them fewer than BLOCK items of the base class.

    A block of which a log was read is open: it holds its logs as well, which a program may change, until no program has
    one of them any more. A change of the list itself, other than at its end, takes all blocks apart.
    """

    def __init__(self, logs: Iterable[Any] = ()) -> None:
        super().__init__(logs)
        self._blocks: list[bytes] = []
        self._open: dict[int, tuple[bytes | None, list[Any]]] = {}  # with the values that were encoded
        self._texts: dict[bytes | None, bytes] = {}  # of the items, by their values
        self._most_open = FEW

    def __len__(self) -> int:
        return BLOCK * len(self._blocks) + super().__len__()

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        at = operator.index(index) + (len(self) if index < 0 else 0)
        if at < 0:
            raise IndexError("list index out of range")
        behind = at - BLOCK * len(self._blocks)
        return list.__getitem__(self, behind) if behind >= 0 else self._logs(at // BLOCK)[at % BLOCK]

    __iter__, __contains__, __reversed__ = Sequence.__iter__, Sequence.__contains__, Sequence.__reversed__
    index, count = Sequence.index, Sequence.count  # type: ignore[assignment]

    def _logs(self, block: int) -> list[Any]:
        if block not in self._open:
            if len(self._open) >= self._most_open:
                self._close()
                self._most_open = max(FEW, 2 * len(self._open))
            logs = json.loads(b"[%b]" % zlib.decompress(self._blocks[block]))
            self._open[block] = _values(logs), logs
        return self._open[block][1]

    def _close(self) -> None:
        """Encodes open blocks that have changed, and closes those whose logs no one else has."""
        for block, (encoded, logs) in list(self._open.items()):
            values = _values(logs)
            if values is None or values != encoded:
                self._blocks[block], self._open[block] = _compressed(map(_text, logs)), (values, logs)
            if all(map(_is_plain, logs)) and _references(logs) <= _ALONE:
                del self._open[block]

    def take_apart(self) -> None:
        """Makes all logs items of the base class."""
        logs = list(self)
        self._blocks, self._open = [], {}
        list.__setitem__(self, slice(None), logs)

    def pack(self) -> None:
        """Encodes the last item, and makes blocks. Raises TypeError or ValueError for what JSON cannot hold."""
        list(map(self._encoded, list.__getitem__(self, slice(-1, None))))
        while list.__len__(self) >= BLOCK:
            logs = list.__getitem__(self, slice(BLOCK))
            self._blocks.append(_compressed(map(self._encoded, logs)))
            list.__delitem__(self, slice(BLOCK))
            self._open[len(self._blocks) - 1], self._texts = (_values(logs), logs), {}
            self._close()

    def _encoded(self, log: Any) -> bytes:
        values = _values(log)
        text = self._texts.get(values) or _text(log)
        if values is not None:
            self._texts[values] = text
        return text

    def pieces(self) -> Iterator[bytes]:
        """The JSON text of the logs, as they are at this call."""
        self.pack()
        self._close()
        last = _NEXT.join(map(self._encoded, list.__iter__(self)))
        texts = chain(map(zlib.decompress, list(self._blocks)), [last] if last else [])
        return (begin + text for begin, text in zip(chain([_FIRST], repeat(_NEXT)), texts, strict=False))

    def take(self, text: bytes, begin: int, end: int) -> None:
        """Adds the logs of a JSON text between these indices."""
        cuts = [begin, *(found.end() for found in islice(_BETWEEN.finditer(text, begin, end), BLOCK - 1, None, BLOCK))]
        for first, last in pairwise(cuts):
            self._blocks.append(zlib.compress(memoryview(text)[first : last - len(_NEXT)], 1))
        self.extend(json.loads(b"[%b]" % text[cuts[-1] : end]))
        self._texts = dict(zip(map(_values, list.__iter__(self)), _BETWEEN.split(text[cuts[-1] : end]), strict=True))


def _text(log: Any) -> bytes:
    return json.dumps(log, indent=2, sort_keys=True).replace("\n", "\n    ").encode()


def _compressed(texts: Iterable[bytes]) -> bytes:
    return zlib.compress(_NEXT.join(texts), 1)


def _values(value: Any) -> bytes | None:
    """Tells values and their types apart; None where that is unknown."""
    try:
        return marshal.dumps(value, 2)
    except ValueError:
        return None


def _is_plain(log: Any) -> bool:
    """Whether nothing inside can be changed."""
    return type(log) is dict and {*map(type, log), *map(type, log.values())} <= _PLAIN


def _references(values: list[Any]) -> int:
    return max(map(sys.getrefcount, values))


_ALONE = _references([{}])  # to what one list alone has


def _changing(name: str) -> Callable[..., Any]:
    def change(logs: LogHistory, *values: Any, **options: Any) -> Any:
        logs.take_apart()
        return getattr(list, name)(logs, *values, **options)

    return change


def _of_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda logs, *others: function(list(logs), *others)


for _name in ("__setitem__", "__delitem__", "clear", "insert", "pop", "remove", "reverse", "sort"):
    setattr(LogHistory, _name, _changing(_name))
for _name, _function in {
    **{name: getattr(operator, name) for name in ("__add__", "__eq__", "__ne__", "__mul__")},
    "__radd__": lambda logs, other: other + logs,
    "__rmul__": operator.mul,
    "__repr__": repr,
    "copy": list,
    "__reduce_ex__": lambda logs, _: (list, (logs,)),  # a copy is an ordinary list
}.items():
    setattr(LogHistory, _name, _of_copy(_function))


def pack(state: TrainerState) -> None:
    """Packs a state's history. A list that a program has put there stays if the program has kept it, and may change it.
    What cannot be encoded is left to the next save, which says why."""
    if type(state.log_history) is list and _references([state.log_history]) <= _ALONE + 1:
        state.log_history = LogHistory(state.log_history)
    if isinstance(state.log_history, LogHistory):
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            state.log_history.pack()


def encode_state(state: TrainerState) -> Iterator[bytes]:
    """The content of trainer_state.json as transformers writes it, in pieces, as it is at this call: they may be taken
    later, in any thread. Raises TypeError or ValueError for what JSON cannot hold."""
    rest, history = copy(state), state.log_history
    rest.log_history = []
    text = (json.dumps(asdict(rest), indent=2, sort_keys=True) + "\n").encode()
    if not history:
        return iter([text])
    pieces = (history if isinstance(history, LogHistory) else LogHistory(history)).pieces()
    begin, _, end = text.partition(_KEY + b"]")
    return chain([begin + _KEY], pieces, [b"\n  ]" + end])


def read_state(path: Path) -> TrainerState:
    """Reads trainer_state.json; most logs are decoded once they are read. Raises OSError or ValueError."""
    text, history = path.read_bytes(), LogHistory()
    begin, end = text.find(_KEY + _FIRST), text.find(_END)
    try:
        history.take(text, begin + len(_KEY + _FIRST), end)
        state = TrainerState(**json.loads(text[:begin] + _KEY + b"]" + text[end + 4 :]))
    except ValueError:  # it is indented otherwise, or has no logs
        state = TrainerState.load_from_json(str(path))
        history = LogHistory(state.log_history)
    state.log_history = history
    return state
