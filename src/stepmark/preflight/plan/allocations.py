"""Counts the memory of tensors that a program allocates, without any of them being real.

Under torch's FakeTensorMode every operation of a real step runs, and its results have shapes, dtypes and storages but
no memory. The tracker sees each storage that is created or released, so it knows at any time what would be allocated.
Workspace that a kernel releases before it returns is not counted.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stepmark.sharding.dtensor import is_dtensor

# Categories of memory, in the order in which they are shown.
PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
MASTER_WEIGHTS = "master weights"
COMMUNICATION = "communication"
ACTIVATIONS = "activations"
CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER, MASTER_WEIGHTS, COMMUNICATION, ACTIVATIONS)

ACCUMULATING = (
    torch.ops.aten.add.Tensor,
    torch.ops.aten.scatter_add.default,
    torch.ops.aten.index_add.default,
    torch.ops.aten.index_put.default,
)


class AllocationTracker(TorchDispatchMode):
    """Active while a program runs under FakeTensorMode. `rounding`: bytes to whose multiple the allocator rounds."""

    def __init__(self, rounding: int = 1) -> None:
        super().__init__()
        self._rounding = rounding
        self._category = ACTIVATIONS
        self._window: str | None = None
        self._sizes: list[int] = []
        self._categories: list[str] = []
        self._numbers: dict[int, int] = {}  # of the storages that are allocated, by address
        self._log: dict[str, list[int]] = {}  # by window: a storage's number, or ~number when it is released
        self._resized: set[int] = set()  # the numbers that storages had before they were resized
        self._summed: int | None = None  # the storage to which autograd has just added another gradient
        self._at_start: dict[str, list[int]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        result = function(*arguments, **(keywords or {}))
        self._summed = None
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not is_dtensor(leaf) and not leaf.is_meta:
                self._see(leaf.untyped_storage())
        # Autograd accumulates gradients, of several uses of a tensor, or of its parts, in place if it holds the only
        # reference to the sum, but never with fake tensors. Checkpointed forward passes, which run within a backward
        # pass, record gradients.
        in_backward = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
        if in_backward and function in ACCUMULATING:
            self._summed = self._numbers.get(arguments[0].untyped_storage()._cdata)
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address in self._numbers:
            return
        number = self._numbers[address] = len(self._sizes)
        self._sizes.append(-(-storage.nbytes() // self._rounding) * self._rounding)
        self._categories.append(self._category)
        self._record(number)
        weakref.finalize(storage, self._release, address, number).atexit = False

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """Inside the block, it sees storages that are resized: parameters that are gathered, and freed again."""
        original = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            number = self._numbers.get(storage._cdata)
            result = original(storage, size)
            if number is not None:
                self._release(storage._cdata, number)
                self._resized.add(number)
            with self.within(PARAMETERS):
                self._see(storage)
            return result

        with mock.patch.object(torch.UntypedStorage, "resize_", resize):
            yield

    def _release(self, address: int, number: int) -> None:
        if number in self._resized:
            return
        if self._numbers.get(address) == number:
            del self._numbers[address]
        self._record(~number)
        if number == self._summed and self._window is not None:
            log = self._log[self._window]
            log[-2:] = reversed(log[-2:])  # no other reference: autograd would add in place

    def _record(self, event: int) -> None:
        if self._window is not None:
            self._log[self._window].append(event)

    def enter(self, window: str, category: str) -> None:
        """Attributes what follows to `window`, a part of the step, and to `category` unless `assign` says otherwise."""
        self._window, self._category = window, category
        if window not in self._log:
            self._log[window], self._at_start[window] = [], list(self._numbers.values())

    @contextmanager
    def within(self, category: str) -> Iterator[None]:
        """Attributes allocations in the block to `category`."""
        before, self._category = self._category, category
        try:
            yield
        finally:
            self._category = before

    def assign(self, tensors: Iterable[Any], category: str) -> None:
        """The memory of these tensors belongs to `category`, whenever it was allocated."""
        for each in tensors:
            tensor = each._local_tensor if is_dtensor(each) else each
            if isinstance(tensor, Tensor):
                number = self._numbers.get(tensor.untyped_storage()._cdata)
                if number is not None:
                    self._categories[number] = category

    def count(self, kind: str) -> int:
        """Number of windows so far whose names begin with `kind`."""
        return sum(window.startswith(kind) for window in self._log)

    def forget(self) -> None:
        """Drops the windows, but not what is allocated, so that the next step is recorded instead."""
        self._window, self._summed = None, None
        self._log, self._at_start = {}, {}

    def allocated(self) -> dict[str, int]:
        """Bytes allocated now, by category."""
        return self._usage(self._numbers.values())

    def peaks(self) -> dict[str, dict[str, int]]:
        """Bytes by category at the peak of each window. A backward pass has two, one for each half, whose peaks have
        different causes: activations still held, and gradients already computed."""
        found = {}
        for window, log in self._log.items():
            middle = len(log) // 2 if window.startswith("backward") else len(log)
            live = dict.fromkeys(self._at_start[window])
            for half, events in enumerate((log[:middle], log[middle:])):
                if events or not half:
                    name = window if middle == len(log) else f"{window}, {'first' if not half else 'second'} half"
                    found[name] = self._usage(self._peak(live, events))
        return found

    def _peak(self, live: dict[int, None], events: list[int]) -> list[int]:
        """The storages at the peak. `live` is advanced to the end of the events."""
        changes = (self._sizes[event] if event >= 0 else -self._sizes[~event] for event in events)
        totals = [*accumulate(changes, initial=sum(self._sizes[number] for number in live))]
        until = totals.index(max(totals))
        _advance(live, events[:until])
        at_peak = list(live)
        _advance(live, events[until:])
        return at_peak

    def _usage(self, numbers: Iterable[int]) -> dict[str, int]:
        usage: Counter[str] = Counter()
        for number in numbers:
            usage[self._categories[number]] += self._sizes[number]
        return {category: usage[category] for category in CATEGORIES}


def _advance(live: dict[int, None], events: list[int]) -> None:
    for event in events:
        if event >= 0:
            live[event] = None
        else:
            live.pop(~event, None)
