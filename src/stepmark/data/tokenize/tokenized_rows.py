"""Tokenized rows of different lengths, concatenated, in memory or in a cache entry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from stepmark.data.tokenize.token_cache import MappedArray, TokenFile

Array = np.ndarray[Any, Any]
IDS, TARGETS, LENGTHS = "ids.bin", "targets.bin", "lengths.bin"
_TYPES: dict[str, np.dtype[Any]] = {IDS: np.dtype("<u4"), TARGETS: np.dtype("u1"), LENGTHS: np.dtype("<i8")}


class TokenizedRows:
    """Rows of token ids, each id with a flag: whether it is a target.

    `folder`: where `write_rows` has put them, with `prefix` before their files' names.
    """

    def __init__(self, folder: Path, prefix: str = "") -> None:
        files = {name: MappedArray(folder / f"{prefix}{name}", kind) for name, kind in _TYPES.items()}
        self._arrays: Mapping[str, MappedArray | Array] = files

    @classmethod
    def of(cls, rows: Iterable[tuple[list[int], list[bool]]]) -> TokenizedRows:
        """The rows in memory."""
        parts: dict[str, list[Array]] = {name: [] for name in _TYPES}
        for part in _parts(rows):
            for name, array in part.items():
                parts[name].append(array)
        made = cls.__new__(cls)
        made._arrays = {name: np.concatenate([np.empty(0, _TYPES[name]), *each]) for name, each in parts.items()}
        return made

    def __len__(self) -> int:
        return len(self._array(LENGTHS))

    @property
    def lengths(self) -> Array:
        """Tokens of each row, int64 [rows]."""
        return self._array(LENGTHS)

    @property
    def longest(self) -> int:
        return int(self.lengths.max(initial=0))

    def row(self, number: int) -> tuple[Array, Array]:
        start = int(self._begins[number])
        stop = start + int(self.lengths[number])
        return self._array(IDS)[start:stop], self._array(TARGETS)[start:stop] != 0

    def with_targets(self, longest: int) -> Array:
        """The indices of the rows with a target among their first `longest` tokens; the first one is not predicted."""
        counts = np.concatenate([[0], np.cumsum(self._array(TARGETS), dtype=np.int64)])
        begins = self._begins + 1
        ends = np.maximum(self._begins + np.minimum(self.lengths, longest), begins)
        some = counts[np.minimum(ends, len(counts) - 1)] > counts[np.minimum(begins, len(counts) - 1)]
        return np.flatnonzero(some & (self.lengths > 1))

    def __getstate__(self) -> dict[str, Any]:
        return {"_arrays": self._arrays}

    @cached_property
    def _begins(self) -> Array:
        return np.cumsum(self.lengths) - self.lengths

    def _array(self, name: str) -> Array:
        found = self._arrays[name]
        return found.values if isinstance(found, MappedArray) else found


def write_rows(folder: Path, prefix: str, rows: Iterable[tuple[list[int], list[bool]]]) -> dict[str, dict[str, Any]]:
    """Writes the rows into files of `folder` whose names begin with `prefix`; returns their entries for `meta.json`."""
    files = {name: TokenFile(folder / f"{prefix}{name}", kind) for name, kind in _TYPES.items()}
    with files[IDS], files[TARGETS], files[LENGTHS]:
        for part in _parts(rows):
            for name, array in part.items():
                files[name].append(array)
    return {f"{prefix}{name}": file.summary for name, file in files.items()}


def _parts(rows: Iterable[tuple[list[int], list[bool]]]) -> Iterator[dict[str, Array]]:
    for ids, targets in rows:
        made: dict[str, Any] = {IDS: ids, TARGETS: targets, LENGTHS: [len(ids)]}
        yield {name: np.array(values, dtype=_TYPES[name]) for name, values in made.items()}
