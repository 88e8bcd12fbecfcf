"""Which rank writes which bytes of which file: a pure function of what the ranks hold, the same on every rank.

Ranks that hold the same slice of a tensor are its replicas. Slices with the same replicas are written together: they
are divided among the nodes that have replicas, a node's slices are laid out in files, and the bytes of these files are
divided evenly, at multiples of CHECKSUM_BLOCK, among the replicas on that node. So nothing is written twice, no two
nodes write to one file, and a file's first writer can add the header once it has all checksums. What only the first
rank saves, since replicas may differ in it, goes to files that this rank writes alone.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapreplace
from itertools import accumulate, pairwise
from typing import NamedTuple

from stepmark.checkpoint.format.checksums import CHECKSUM_BLOCK
from stepmark.checkpoint.format.dtypes import item_size
from stepmark.checkpoint.format.manifest import FileEntry
from stepmark.checkpoint.format.tensor_file import PAGE, StoredTensor, header_size, order
from stepmark.errors import UsageError
from stepmark.sharding.layout import Shape, TensorSlice

# Tensors of a file. Its header stays below the 100 MB that safetensors accepts: a tensor takes about 0.5 kB there, at
# most 5 kB with a name of 127 escaped characters, and checksums take 18 bytes per MiB.
MAX_TENSORS = 15_000
_LARGEST_FILE = 1_000_000_000_000  # bytes
ANY_ONE = 2


class SliceRecord(NamedTuple):
    """A slice of a tensor that a rank holds. `group` is its file, without number and suffix: model, state/loader.

    `first`: of the ranks that hold the same slice, the first writes all of it, since the others' values may differ;
    with ANY_ONE, the one that writes least.
    """

    group: str
    name: str
    dtype: str
    shape: Shape
    slice: TensorSlice
    first: int = False

    @property
    def nbytes(self) -> int:
        return self.slice.numel * item_size(self.dtype)


@dataclass(frozen=True)
class Share:
    """Bytes [begin, end) of a file's data, written by one rank."""

    rank: int
    begin: int
    end: int


@dataclass(frozen=True)
class PlannedFile:
    """A tensor file. The first share's rank writes the header as well."""

    name: str
    group: str
    save: str
    tensors: tuple[StoredTensor, ...]
    shares: tuple[Share, ...]

    @cached_property
    def header_size(self) -> int:
        """Where the data begins; computed when it is needed, since most ranks write few of the files."""
        return header_size(self.tensors, self.save)

    @property
    def data_size(self) -> int:
        return self.tensors[-1].end if self.tensors else 0

    @property
    def size(self) -> int:
        return self.header_size + self.data_size

    @property
    def finalizer(self) -> int:
        return self.shares[0].rank

    def entry(self, header: str) -> FileEntry:
        """As the manifest lists it; `header` is its checksum."""
        writers = tuple((share.rank, share.end) for share in self.shares)
        return FileEntry(self.name, self.size, header, self.header_size, writers)


@dataclass(frozen=True)
class SavePlan:
    """All files of a save, and how many bytes each rank writes."""

    files: tuple[PlannedFile, ...]
    loads: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of all files, a little too many."""
        return sum(self.loads) + sum(PAGE + 512 * len(file.tensors) for file in self.files)


@dataclass(frozen=True)
class Holding:
    """A table of slices, and the ranks that hold exactly these."""

    rows: tuple[SliceRecord, ...]
    ranks: tuple[int, ...]


def plan_save(
    holdings: Sequence[Holding], nodes: Sequence[int], save: str, *, max_file_size: int = 5_000_000_000
) -> SavePlan:
    """Plans a save of the slices that ranks hold; `nodes[rank]` is the node a rank is on.

    `max_file_size`, in bytes, applies to a file's tensors; a larger tensor gets a separate file. `save` is the name of
    the save, for the size of the headers. Raises UsageError where the slices of a tensor overlap or are incomplete.
    """
    loads = [0] * len(nodes)
    numbered: dict[str, list[tuple[tuple[StoredTensor, ...], tuple[Share, ...]]]] = defaultdict(list)
    for group, replicas, rows in _by_replicas(holdings):
        for members, node_rows in _divide_among_nodes(rows, replicas, nodes):
            parts = _files_of(node_rows, min(max_file_size, _LARGEST_FILE))
            files = [order([row[1:5] for row in part]) for part in parts]
            numbered[group] += zip(files, _divide_bytes(files, members, loads), strict=True)
    files_of_all = []
    for group, planned in numbered.items():
        for number, (tensors, shares) in enumerate(planned, start=1):
            part = f"-{number:05d}-of-{len(planned):05d}" if len(planned) > 1 else ""  # as in transformers
            files_of_all.append(PlannedFile(f"{group}{part}.safetensors", group, save, tensors, shares))
    return SavePlan(tuple(files_of_all), tuple(loads))


def _by_replicas(holdings: Sequence[Holding]) -> Iterable[tuple[str, tuple[int, ...], list[SliceRecord]]]:
    """(group, ranks that write, rows) for the rows of a group that the same ranks hold, in order of appearance."""
    holders: dict[SliceRecord, list[int]] = {}
    for index, holding in enumerate(holdings):
        for row in holding.rows:
            holders.setdefault(row, []).append(index)
    _check_coverage(holders)
    ranks_of: dict[tuple[int, ...], tuple[int, ...]] = {}
    alone: dict[int, int] = defaultdict(int)  # bytes that a rank writes alone, although others hold them
    from_one: dict[tuple[str, tuple[int, ...]], list[SliceRecord]] = defaultdict(list)
    together: dict[tuple[str, tuple[int, ...]], list[SliceRecord]] = defaultdict(list)
    for row, indices in holders.items():
        key = tuple(indices)
        if key not in ranks_of:
            ranks_of[key] = tuple(sorted({rank for index in key for rank in holdings[index].ranks}))
        replicas = ranks_of[key]
        if row.first and len(replicas) > 1:
            writer = min(replicas, key=lambda rank: alone[rank]) if row.first == ANY_ONE else replicas[0]
            alone[writer] += row.nbytes
            from_one[row.group, (writer,)].append(row)
        else:
            together[row.group, replicas].append(row)
    for planned in (from_one, together):  # in this order: what can be divided evens out the ranks' loads
        for (group, replicas), rows in planned.items():
            yield group, replicas, rows


def _check_coverage(rows: Iterable[SliceRecord]) -> None:
    """Raises UsageError unless the ranks agree on each tensor and hold all of it."""
    tensors: dict[tuple[str, str], tuple[str, Shape]] = {}
    held: dict[tuple[str, str], int] = defaultdict(int)
    for group, name, dtype, shape, tensor_slice, _ in rows:
        key = (group, name)
        known = tensors.setdefault(key, (dtype, shape))
        if known != (dtype, shape):
            raise UsageError(
                f"tensor {name!r} is {known[0]} {list(known[1])} on one rank and {dtype} {list(shape)} on another; all "
                "ranks have to save the same tensor under one name"
            )
        held[key] += tensor_slice.stop - tensor_slice.start
    for (group, name), count in held.items():
        numel = math.prod(tensors[group, name][1])
        if count != numel:
            shown = "is incomplete: the ranks' shards cover only"
            if count > numel:
                shown = "is saved twice in parts: the ranks' shards overlap, with"
            raise UsageError(f"tensor {name!r} {shown} {count} of {numel} elements")


def _divide_among_nodes(
    rows: list[SliceRecord], replicas: tuple[int, ...], nodes: Sequence[int]
) -> list[tuple[tuple[int, ...], list[SliceRecord]]]:
    """Divides slices among the nodes of their replicas, the largest first, each to the node that has the least."""
    members: dict[int, list[int]] = defaultdict(list)
    for rank in replicas:
        members[nodes[rank]].append(rank)
    if len(members) == 1:
        return [(replicas, rows)]
    # A node's share is in proportion to its replicas, so that all ranks have the same.
    least = [(0.0, node) for node in members]
    indices: dict[int, list[int]] = {node: [] for node in members}
    sizes = [row.nbytes for row in rows]
    for index in sorted(range(len(rows)), key=lambda i: -sizes[i]):
        load, node = least[0]
        heapreplace(least, (load + sizes[index] / len(members[node]), node))
        indices[node].append(index)
    return [
        (tuple(ranks), [rows[index] for index in sorted(indices[node])])
        for node, ranks in members.items()
        if indices[node]
    ]


def _files_of(rows: list[SliceRecord], max_file_size: int) -> list[list[SliceRecord]]:
    """Rows in order, split where a file would exceed a limit. No file has two slices of one tensor."""
    lanes: dict[int, list[list[SliceRecord]]] = {}
    sizes: dict[int, int] = {}
    units: dict[int, int] = {}
    seen: dict[str, int] = defaultdict(int)
    for row in rows:
        lane = seen[row.name]
        seen[row.name] += 1
        size, unit = row.nbytes, 1 + len(row.name) // 128  # a long name counts for several tensors in a header
        if lane not in lanes or sizes[lane] + size > max_file_size or units[lane] + unit > MAX_TENSORS:
            lanes.setdefault(lane, []).append([])
            sizes[lane] = units[lane] = 0
        lanes[lane][-1].append(row)
        sizes[lane] += size
        units[lane] += unit
    return [part for parts in lanes.values() for part in parts]


def _divide_bytes(
    files: Sequence[tuple[StoredTensor, ...]], members: Sequence[int], loads: list[int]
) -> list[tuple[Share, ...]]:
    """Divides the files' bytes, one file after the other, into loads as equal as possible; adds to `loads`."""
    sizes = [tensors[-1].end if tensors else 0 for tensors in files]
    starts = list(accumulate(sizes, initial=0))
    quotas = _level([loads[rank] for rank in members], starts[-1])
    # The least loaded first: a remainder, which cannot be divided, goes to one with much room.
    order = sorted(range(len(members)), key=lambda index: -quotas[index])
    members, quotas = [members[index] for index in order], [quotas[index] for index in order]
    bounds = [_snap(position, starts) for position in accumulate(quotas, initial=0)]
    bounds[-1] = starts[-1]
    divided = []
    for start, end in pairwise(starts):
        shares = [
            Share(rank, max(begin, start) - start, min(stop, end) - start)
            for rank, (begin, stop) in zip(members, pairwise(bounds), strict=True)
            if max(begin, start) < min(stop, end)
        ]
        divided.append(tuple(shares) or (Share(members[0], 0, 0),))
        for share in shares:
            loads[share.rank] += share.end - share.begin
    return divided


def _snap(position: int, starts: Sequence[int]) -> int:
    """The nearest place where bytes may be divided: a file's end, or a multiple of CHECKSUM_BLOCK from its start."""
    index = min(bisect_right(starts, position), len(starts) - 1)
    start, end = starts[index - 1], starts[index]
    before = start + (position - start) // CHECKSUM_BLOCK * CHECKSUM_BLOCK
    after = min(end, before + CHECKSUM_BLOCK)
    return before if position - before <= after - position else after


def _level(loads: Sequence[int], amount: int) -> list[int]:
    """How much of `amount` each gets, so that the largest load is as small as possible."""
    by_load = sorted(range(len(loads)), key=lambda i: loads[i])
    for count in range(len(by_load), 0, -1):
        chosen = by_load[:count]
        level = (amount + sum(loads[i] for i in chosen)) / count
        if level >= loads[chosen[-1]]:
            break
    quotas = [0] * len(loads)
    for i in chosen:
        quotas[i] = int(level - loads[i])
    return quotas
