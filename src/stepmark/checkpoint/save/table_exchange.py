"""Gathers what all ranks hold: each distinct table is sent once, by one of its ranks."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stepmark.checkpoint.format.checksums import bytes_checksum
from stepmark.checkpoint.format.manifest import KINDS
from stepmark.checkpoint.save.plan import Holding, SliceRecord
from stepmark.checkpoint.sections import Section
from stepmark.errors import UsageError
from stepmark.filesystem.json_values import TAG
from stepmark.filesystem.printable import listed
from stepmark.liveness.gc_pause import without_collection
from stepmark.liveness.status_board import StatusBoard
from stepmark.liveness.timed_collectives import TimedGroup
from stepmark.sharding.layout import Box, TensorSlice

logger = logging.getLogger("stepmark")

SAMPLES = "samples"  # of a state dict's unsharded tensors, by name, which ranks compare and nobody saves
_told: set[str] = set()


@dataclass(frozen=True)
class RankTables:
    """One rank's sections: by group the rows in portable form, and the values of all sections. `first`: of plain values
    that differ between ranks, the first rank's is saved."""

    rows: dict[str, bytes]
    values: bytes
    first: bool = False

    def checksums(self) -> dict[str, str]:
        """The checksum of each table, and of the values under the empty name."""
        return {**{group: bytes_checksum(data) for group, data in self.rows.items()}, "": bytes_checksum(self.values)}


@without_collection()
def tabulate(sections: Sequence[Section], *, first: bool = False) -> RankTables:
    rows = {}
    for section in sections:
        listed = [
            SliceRecord(entry.group, entry.name, entry.dtype, entry.layout.shape, part.slice, entry.first)
            for entry in section.entries.values()
            for part in entry.layout.parts
        ]
        if listed:
            rows[section.group] = encode_rows(listed)
    values = {section.name: {"kind": section.kind, **section.values} for section in sections}
    return RankTables(rows, json.dumps(values).encode(), first)


def encode_rows(rows: Sequence[SliceRecord]) -> bytes:
    """A table of rows of one group in portable form; complete tensors have null as their slice."""
    slices = (None if row.slice.is_full(row.shape) else row.slice for row in rows)
    table = [[row.name, row.dtype, row.shape, each, row.first] for row, each in zip(rows, slices, strict=True)]
    return json.dumps(table).encode()


def _rows_from_json(group: str, data: bytes) -> tuple[SliceRecord, ...]:
    rows = []
    for name, dtype, shape, place, first in json.loads(data):
        tensor_slice = TensorSlice.full(shape)
        if place is not None:
            (offsets, lengths), start, stop = place
            tensor_slice = TensorSlice(Box(tuple(offsets), tuple(lengths)), start, stop)
        rows.append(SliceRecord(group, name, dtype, tuple(shape), tensor_slice, first))
    return tuple(rows)


TableChecksums = Sequence[dict[str, str]]  # each rank's `RankTables.checksums()`


def gather_rows(
    tables: RankTables, checksums_of_all: TableChecksums, meeting: TimedGroup, board: StatusBoard | None = None
) -> list[Holding]:
    """All distinct tables, each with the ranks that hold it; collective."""
    holders = {key: ranks for key, ranks in _holders(checksums_of_all).items() if key[0]}
    sent = _exchange(tables.rows, holders, meeting, board, "planning a save")
    return [
        Holding(_rows_from_json(name, data), tuple(holders[name, checksum])) for (name, checksum), data in sent.items()
    ]


def gather_values(
    tables: RankTables, checksums_of_all: TableChecksums, meeting: TimedGroup, board: StatusBoard | None = None
) -> dict[str, Any]:
    """The values of all ranks in one; collective where they differ.

    Raises UsageError, on every rank, where ranks hold different plain values under one name, unless the first counts:
    then it is told, once, and so are tensors of which `SAMPLES` differ.
    """
    holders = {key: ranks for key, ranks in _holders(checksums_of_all).items() if not key[0]}
    values: dict[str, Any] = json.loads(tables.values) if len(holders) == 1 else {}
    differing: list[str] | None = [] if tables.first else None
    if len(holders) > 1:
        for key, data in _exchange({"": tables.values}, holders, meeting, board, "merging plain values").items():
            values = _merge(values, json.loads(data), (), holders[key][0], differing)
    for section in values.values():
        section.pop(SAMPLES, None)
    if differing and meeting.rank == 0 and not _told.issuperset(differing):
        _told.update(differing)
        names = listed(differing, 5)
        logger.warning("%s: ranks have different values, of which one is saved; give each a name of its own", names)
    return values


def _holders(checksums_of_all: TableChecksums) -> dict[tuple[str, str], list[int]]:
    """(name, checksum) of each distinct table, with the ranks that hold it."""
    holders: dict[tuple[str, str], list[int]] = {}
    for rank, checksums in enumerate(checksums_of_all):
        for name, checksum in checksums.items():
            holders.setdefault((name, checksum), []).append(rank)
    return holders


def _exchange(
    mine: dict[str, bytes],
    holders: dict[tuple[str, str], list[int]],
    meeting: TimedGroup,
    board: StatusBoard | None,
    what: str,
) -> dict[tuple[str, str], bytes]:
    """Each distinct table, from the first rank that holds it, in the order of `holders`."""
    packed = {key: zlib.compress(mine[key[0]], 1) for key, ranks in holders.items() if ranks[0] == meeting.rank}
    sent: dict[tuple[str, str], bytes] = {}
    for part in meeting.all_gather(packed, what, board):
        sent.update(part)
    return {key: zlib.decompress(sent[key]) for key in holders}


def _merge(one: Any, other: Any, path: tuple[str, ...], rank: int, differing: list[str] | None) -> Any:
    """The union of two nests of dicts that agree where both have something. A value with a tag is one, not a nest."""
    if isinstance(one, dict) and isinstance(other, dict) and not (_is_tagged(one) or _is_tagged(other)):
        merged = dict(one)
        for key, value in other.items():
            merged[key] = _merge(one[key], value, (*path, key), rank, differing) if key in one else value
        return merged
    if one != other:
        where = " / ".join(key for key in path if key != "value")
        differ = f"{where} is {str(other)[:60]} on rank {rank} and {str(one)[:60]} on one before it"
        if differing is None or path[1:2] in (("kind",), (KINDS,)):
            raise UsageError(
                f"ranks save different values: {differ}; plain values have to be the same on all ranks: gather what "
                "differs into one value, or leave it out"
            )
        differing.append(".".join(path[2:]))
    return one


def _is_tagged(value: dict[str, Any]) -> bool:
    """Whether it encodes a value that JSON does not have; a section or parameter may have the tag's name too."""
    return isinstance(value.get(TAG), str)
