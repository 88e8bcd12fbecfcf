"""Who writes which bytes of which file: a pure function of what the ranks hold, the same on every rank.

Ranks that hold the same piece of a tensor are its replicas. Pieces with the same replicas are written together: whole
pieces are divided among the nodes on which there are replicas, a node's pieces are laid out in files, and the bytes of
these files are divided evenly, at multiples of CELL, among the replicas on that node. So nothing is written twice, no
two nodes write to one file, and a file's first writer can add the header once all of its digests are there.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise

from stepmark.checkpoint.format.checksums import CHECKSUM_BLOCK
from stepmark.checkpoint.format.tensor_file import PAGE, StoredTensor, header_size, order
from stepmark.checkpoint.sections import Row
from stepmark.errors import UsageError
from stepmark.sharding.layout import Shape

MAX_HEADER = 50_000_000  # bytes; safetensors refuses more than 100 million


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
        """Where the data begins; found out when it is asked for, since most ranks write few of the files."""
        return header_size(self.tensors, self.save)

    @property
    def data_size(self) -> int:
        return self.tensors[-1].end if self.tensors else 0

    @property
    def size(self) -> int:
        return self.header_size + self.data_size

    @property
    def sealer(self) -> int:
        """The rank that writes the header."""
        return self.shares[0].rank


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
    """A table of pieces, and the ranks that hold exactly it."""

    rows: tuple[Row, ...]
    ranks: tuple[int, ...]


def plan_save(
    holdings: Sequence[Holding], nodes: Sequence[int], save: str, *, max_file_size: int = 5_000_000_000
) -> SavePlan:
    """Plans a save of the pieces that ranks hold; `nodes[rank]` is the node a rank is on.

    `max_file_size`, in bytes, applies to a file's tensors; one larger tensor has a file of its own. `save` is the
    identity of the save, for the size of the headers. Raises UsageError where pieces leave a part of a tensor to
    nobody.
    """
    loads = [0] * len(nodes)
    numbered: dict[str, list[tuple[tuple[StoredTensor, ...], tuple[Share, ...]]]] = defaultdict(list)
    for group, replicas, rows in _by_replicas(holdings):
        for members, node_rows in _divide_among_nodes(rows, replicas, nodes):
            # Rows of the first rank lie together, so that they take few cells away from the others.
            parts = _files_of(node_rows, max_file_size)
            if any(row.first for row in node_rows):
                parts = [sorted(part, key=lambda row: row.first) for part in parts]
            files = [order([row[1:5] for row in part]) for part in parts]
            kept = [{row.name for row in part if row.first} for part in parts]
            for index, shares in enumerate(_divide_bytes(files, members, loads)):
                taken = _taken_whole(files[index], kept[index])
                numbered[group].append((files[index], _give(shares, taken, members[0], loads)))
    files_of_all = []
    for group, planned in numbered.items():
        for number, (tensors, shares) in enumerate(planned, start=1):
            name = file_name(group, number, len(planned))
            files_of_all.append(PlannedFile(name, group, save, tensors, shares))
    return SavePlan(tuple(files_of_all), tuple(loads))


def file_name(group: str, number: int, count: int) -> str:
    """model.safetensors, or model-00002-of-00005.safetensors: the names that transformers knows."""
    return f"{group}.safetensors" if count == 1 else f"{group}-{number:05d}-of-{count:05d}.safetensors"


def _by_replicas(holdings: Sequence[Holding]) -> Iterable[tuple[str, tuple[int, ...], list[Row]]]:
    """Rows with the same group and the same set of ranks that hold them, in the order in which they are first held."""
    holders: dict[Row, list[int]] = {}
    for index, holding in enumerate(holdings):
        for row in holding.rows:
            holders.setdefault(row, []).append(index)
    _check_coverage(holders)
    ranks_of: dict[tuple[int, ...], tuple[int, ...]] = {}
    together: dict[tuple[str, tuple[int, ...]], list[Row]] = defaultdict(list)
    for row, indices in holders.items():
        key = tuple(indices)
        if key not in ranks_of:
            ranks_of[key] = tuple(sorted({rank for index in key for rank in holdings[index].ranks}))
        together[row.group, ranks_of[key]].append(row)
    for (group, replicas), rows in together.items():
        yield group, replicas, rows


def _check_coverage(rows: Iterable[Row]) -> None:
    """Pieces of a tensor that are held must make up the tensor, and agree on what it is."""
    tensors: dict[tuple[str, str], tuple[str, Shape]] = {}
    held: dict[tuple[str, str], int] = defaultdict(int)
    for group, name, dtype, shape, piece, _ in rows:
        key = (group, name)
        known = tensors.setdefault(key, (dtype, shape))
        if known != (dtype, shape):
            raise UsageError(
                f"tensor {name!r} is {known[0]} {list(known[1])} on one rank and {dtype} {list(shape)} on another; all "
                "ranks have to save the same tensor under one name"
            )
        held[key] += piece.stop - piece.start
    for (group, name), count in held.items():
        numel = math.prod(tensors[group, name][1])
        if count != numel:
            trouble = "overlap" if count > numel else "leave parts of it to nobody"
            raise UsageError(f"the pieces of tensor {name!r} that ranks hold {trouble}: {count} of {numel} elements")


def _divide_among_nodes(
    rows: list[Row], replicas: tuple[int, ...], nodes: Sequence[int]
) -> list[tuple[tuple[int, ...], list[Row]]]:
    """Whole pieces to nodes, the largest first, each to the node that has least; with the replicas on that node. Those
    of the first rank go to its node."""
    members: dict[int, list[int]] = defaultdict(list)
    for rank in replicas:
        members[nodes[rank]].append(rank)
    if len(members) == 1:
        return [(replicas, rows)]
    # A node's share is in proportion to its replicas, so that all ranks have the same.
    least = [(0.0, node) for node in members]
    indices: dict[int, list[int]] = {node: [] for node in members}
    sizes = [row.nbytes for row in rows]
    home = nodes[replicas[0]]
    indices[home] = [index for index, row in enumerate(rows) if row.first]
    if indices[home]:
        least = [(sum(sizes[i] for i in indices[n]) / len(members[n]), n) for n in members]
        heapify(least)
    for index in sorted(range(len(rows)), key=lambda i: -sizes[i]):
        if rows[index].first:
            continue
        load, node = least[0]
        heapreplace(least, (load + sizes[index] / len(members[node]), node))
        indices[node].append(index)
    return [
        (tuple(ranks), [rows[index] for index in sorted(indices[node])])
        for node, ranks in members.items()
        if indices[node]
    ]


def _files_of(rows: list[Row], max_file_size: int) -> list[list[Row]]:
    """Rows in order, cut where a file, or its header, would grow beyond the limit; no file has two pieces of one
    tensor."""
    if _fit_in_one_file(rows, max_file_size):
        return [rows]
    lanes: dict[int, list[list[Row]]] = {}
    sizes: dict[int, int] = {}
    headers: dict[int, int] = {}
    seen: dict[str, int] = defaultdict(int)
    for row in rows:
        lane = seen[row.name]
        seen[row.name] += 1
        size, header = row.nbytes, largest_header(row.name, row.shape, row.nbytes)
        if lane not in lanes or sizes[lane] + size > max_file_size or headers[lane] + header > MAX_HEADER:
            lanes.setdefault(lane, []).append([])
            sizes[lane] = headers[lane] = 0
        lanes[lane][-1].append(row)
        sizes[lane] += size
        headers[lane] += header
    return [part for parts in lanes.values() for part in parts]


def _fit_in_one_file(rows: list[Row], max_file_size: int) -> bool:
    """Whether they surely do: quickly told of the many small files that a large world writes."""
    names = {row.name for row in rows}
    size = sum([row.nbytes for row in rows])
    longest, widest = max(map(len, names)), max([row.shape for row in rows], key=len)
    header = len(rows) * largest_header('"' * longest, widest, 0) + largest_header("", (), size)
    return len(names) == len(rows) and size <= max_file_size and header <= MAX_HEADER


def largest_header(name: str, shape: Shape, nbytes: int) -> int:
    """Bytes that a tensor takes in a file's header at most."""
    plain = name.isascii() and name.isprintable() and '"' not in name and "\\" not in name
    # A character outside of the basic plane is two escapes, whose backslashes are escaped again.
    letters = len(name) if plain else 14 * len(name)
    return 4 * letters + 6 * 21 * len(shape) + 18 * (nbytes // CHECKSUM_BLOCK + 2) + 400


def _taken_whole(tensors: Sequence[StoredTensor], names: set[str]) -> list[tuple[int, int]]:
    """The bytes of these tensors in a file, and of the cells of the grid in which they lie."""
    if not names:
        return []
    end = tensors[-1].end
    taken: list[tuple[int, int]] = []
    for tensor in tensors:
        if tensor.name in names and tensor.begin < tensor.end:
            low, high = (
                tensor.begin // CHECKSUM_BLOCK * CHECKSUM_BLOCK,
                min(end, -(-tensor.end // CHECKSUM_BLOCK) * CHECKSUM_BLOCK),
            )
            if taken and low <= taken[-1][1]:
                taken[-1] = (taken[-1][0], high)
            else:
                taken.append((low, high))
    return taken


def _give(
    shares: tuple[Share, ...], taken: Sequence[tuple[int, int]], rank: int, loads: list[int]
) -> tuple[Share, ...]:
    """The shares of a file once a rank has been given these bytes of it; adapts `loads`."""
    for begin, end in taken:
        pieces = [Share(rank, begin, end)]
        for share in shares:
            left, right = min(share.end, begin), max(share.begin, end)
            pieces += [Share(share.rank, share.begin, left)] if share.begin < left else []
            pieces += [Share(share.rank, right, share.end)] if right < share.end else []
            loads[share.rank] -= max(0, min(share.end, end) - max(share.begin, begin))
        loads[rank] += end - begin
        shares = tuple(_joined(sorted(pieces, key=lambda share: share.begin)))
    return shares


def _joined(shares: Iterable[Share]) -> Iterable[Share]:
    """The same shares; neighbours of one rank are one."""
    last: Share | None = None
    for share in shares:
        if last is not None and last.rank == share.rank:
            last = Share(last.rank, last.begin, share.end)
            continue
        if last is not None:
            yield last
        last = share
    if last is not None:
        yield last


def _divide_bytes(
    files: Sequence[tuple[StoredTensor, ...]], members: Sequence[int], loads: list[int]
) -> list[tuple[Share, ...]]:
    """Cuts the files' bytes, one after the other, so that the members' loads become as equal as they can; adds to
    `loads`."""
    sizes = [tensors[-1].end if tensors else 0 for tensors in files]
    starts = list(accumulate(sizes, initial=0))
    quotas = _level([loads[rank] for rank in members], starts[-1])
    # The emptiest first: a remainder, which cannot be cut, goes to one that lacks much.
    order = sorted(range(len(members)), key=lambda index: -quotas[index])
    members, quotas = [members[index] for index in order], [quotas[index] for index in order]
    cuts = [_snap(position, starts) for position in accumulate(quotas, initial=0)]
    cuts[-1] = starts[-1]
    divided = []
    for start, end in pairwise(starts):
        shares = [
            Share(rank, max(begin, start) - start, min(stop, end) - start)
            for rank, (begin, stop) in zip(members, pairwise(cuts), strict=True)
            if max(begin, start) < min(stop, end)
        ]
        divided.append(tuple(shares) or (Share(members[0], 0, 0),))
        for share in shares:
            loads[share.rank] += share.end - share.begin
    return divided


def _snap(position: int, starts: Sequence[int]) -> int:
    """The nearest place where bytes may be cut: a file's end, or a multiple of CELL from its start."""
    index = min(bisect_right(starts, position), len(starts) - 1)
    start, end = starts[index - 1], starts[index]
    before = start + (position - start) // CHECKSUM_BLOCK * CHECKSUM_BLOCK
    after = min(end, before + CHECKSUM_BLOCK)
    return before if position - before <= after - position else after


def _level(loads: Sequence[int], amount: int) -> list[int]:
    """How much of `amount` each gets, so that the fullest is as little filled as possible."""
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
