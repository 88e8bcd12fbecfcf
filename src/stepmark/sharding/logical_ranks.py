"""The data parallel ranks that a run is defined by, however many processes there are to host them.

A logical rank has its own samples and random numbers. A process hosts a contiguous range of them, and runs their
micro-batches one after another. What they add up is added in a fixed tree over the logical ranks: a process adds the
complete subtrees that it hosts, so the sum is the same, bit for bit, on any number of processes.

Where every process sends what one of its ranks has before it goes on with the next (sharded parameters), the tree is
another one: the even ranks, then the odd ones, each in the same way. What arrives at a time is then soon one value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from stepmark.errors import UsageError

Value = TypeVar("Value")

FIELD = "data_parallel_replicas"


@dataclass(frozen=True)
class LogicalRanks:
    """`total` logical ranks on `processes` processes, seen from `process`.

    Attributes:
        fixed: Whether sums are in the order of the tree, so that they do not depend on the number of processes.
        given: Whether somebody has asked for that.
    """

    total: int
    processes: int
    process: int
    fixed: bool = True
    given: bool = False

    @classmethod
    def of(cls, total: int, processes: int, process: int) -> LogicalRanks:
        """What `data_parallel_replicas: total` asks for. Raises UsageError where there are more processes."""
        if processes > total:
            raise UsageError(
                f"{FIELD}: {total} cannot be divided over {processes} data parallel processes, of which each needs one "
                f"or more; start at most {total} of them"
            )
        return cls(total, processes, process, fixed=total > 1, given=True)

    def of_process(self, process: int) -> range:
        """The logical ranks that a process hosts; their numbers differ by at most one, and the first has the most."""
        begin, end = (-(-place * self.total // self.processes) for place in (process, process + 1))
        return range(begin, end)

    @property
    def own(self) -> range:
        """Those that this process hosts."""
        return self.of_process(self.process)

    @cached_property
    def merges(self) -> Mapping[int, int]:
        """How many sums are complete once each of the own logical ranks has ended: each adds the last two values."""
        ends = dict.fromkeys(self.own, 0)
        for root in self.roots[self.process]:
            for node in _nodes(root):
                if len(node) > 1:
                    ends[node[-1]] += 1
        return ends

    @property
    def most(self) -> int:
        """How many logical ranks the fullest process hosts."""
        return len(self.of_process(0))

    @cached_property
    def roots(self) -> list[list[range]]:
        """The largest subtrees that each process hosts completely, in order."""
        return [list(_inside(range(self.total), self.of_process(each))) for each in range(self.processes)]

    @cached_property
    def commute(self) -> bool:
        """Whether the sum is that of one value of each of two processes, which is the same in any order."""
        return [len(each) for each in self.roots] == [1, 1]

    def sum(self, parts: Mapping[range, Value], add: Callable[[Value, Value], Value]) -> Value:
        """The sum in the tree's order of what complete subtrees have added up to."""
        return _sum(range(self.total), parts, add)


@dataclass(frozen=True)
class Turn:
    """That all processes run passes of their logical rank number `place` at a time, as far as they have one."""

    ranks: LogicalRanks
    place: int = 0

    @property
    def last(self) -> bool:
        return self.place + 1 == self.ranks.most

    @cached_property
    def hosts(self) -> dict[int, int]:
        """The logical rank of each process that has one."""
        hosted = {process: self.ranks.of_process(process) for process in range(self.ranks.processes)}
        return {process: each[self.place] for process, each in hosted.items() if len(each) > self.place}


class ArrivingSums(Generic[Value]):
    """The sum of a value of each of `total` logical ranks, which arrive in any order: that of the even ranks and that
    of the odd ones, and so on. `add` may change its first argument."""

    def __init__(self, total: int, add: Callable[[Value, Value], Value]) -> None:
        self._total = total
        self._add = add
        self._parts: dict[tuple[int, int], Value] = {}  # by first rank and the distance to the next

    def arrive(self, rank: int, value: Value) -> None:
        first, distance = rank, 1 << (self._total - 1).bit_length()
        while distance > 1:
            distance //= 2
            other = first ^ distance
            if other < self._total:
                if (other, 2 * distance) not in self._parts:
                    self._parts[first, 2 * distance] = value
                    return
                value = self._add(self._parts.pop((other, 2 * distance)), value)
            first %= distance
        self._parts[0, 1] = value

    def take(self) -> Value:
        """The sum, once all have arrived."""
        return self._parts.pop((0, 1))


def _sum(node: range, parts: Mapping[range, Value], add: Callable[[Value, Value], Value]) -> Value:
    """Not a closure, which would be a cycle that keeps the parts alive."""
    return parts[node] if node in parts else add(*(_sum(half, parts, add) for half in _halves(node)))


def _halves(node: range) -> tuple[range, range]:
    """The children of a node: the first has the largest power of two that is less than the node's ranks."""
    first = 1 << (len(node) - 1).bit_length() - 1
    return node[:first], node[first:]


def _nodes(node: range) -> Iterator[range]:
    yield node
    for half in _halves(node) if len(node) > 1 else ():
        yield from _nodes(half)


def _inside(node: range, hosted: range) -> Iterable[range]:
    if hosted.start <= node.start and node.stop <= hosted.stop:
        yield node
    elif node.start < hosted.stop and hosted.start < node.stop:
        for half in _halves(node):
            yield from _inside(half, hosted)
