"""The buffers of a model that training changes, such as BatchNorm's statistics, where processes host logical ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from stepmark.errors import UsageError
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.logical_ranks import FIELD


class _Place(NamedTuple):
    name: str
    module: nn.Module
    key: str

    @property
    def buffer(self) -> Tensor | None:
        return self.module._buffers[self.key]

    @property
    def state(self) -> tuple[int, int]:
        """Differs once the buffer was written to, or replaced."""
        return id(self.buffer), -1 if self.buffer is None else self.buffer._version


class RankBuffers:
    """Every logical rank begins a step with the same buffers, and those of rank 0 are kept: these are also what
    checkpoints have. So a step does not depend on which process hosts a rank.

    Which buffers change is learned in a process's first step, by their values: torch does not count what BatchNorm
    writes.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._mesh = mesh
        ranks = mesh.ranks
        self._needed = ranks.total > 1 and (ranks.fixed or ranks.total > ranks.processes)
        parts = model.named_modules() if self._needed else ()
        self._places = [
            _Place(f"{name}.{key}".lstrip("."), module, key)
            for name, module in parts
            for key, buffer in module._buffers.items()
            if buffer is not None and not is_fake(buffer)  # which has no values that could change
        ]
        self._learned = False
        self._kept = self._places  # those that change, once it is known

    def begin(self) -> None:
        """Begins a step, with this process's first rank."""
        self._rank = 0
        self._values: dict[int, dict[str, Tensor]] = {}  # of each rank of this process whose passes were begun
        self._changed: set[str] = set()
        several = len(self._mesh.ranks.own) > 1
        self._first = self._copies() if several or not self._learned else {}
        self._note(self._first)

    def enter(self, rank: int) -> None:
        """Goes on with the rank of this process that has the number `rank` in it."""
        if rank == self._rank:
            return
        self._look()
        self._values[self._rank] = self._copies()
        values = self._values.get(rank, self._first)
        for place in self._kept:
            _value(place).copy_(values[place.name])
        self._rank = rank
        self._note(values)

    def end(self) -> None:
        """Ends a step. Collective."""
        if not self._needed:  # not: no buffers, which is a matter of one pipeline stage
            return
        self._look()
        self.enter(0)
        if not self._learned:
            names = {name for told in self._mesh.context.host.all_gather(sorted(self._changed)) for name in told}
            self._kept, self._learned = [place for place in self._places if place.name in names], True
        if self._mesh.ranks.processes > 1 and self._kept:
            self._take_from_first()

    def _copies(self) -> dict[str, Tensor]:
        return {place.name: _value(place).clone() for place in self._kept}

    def _note(self, values: dict[str, Tensor]) -> None:
        """Notes what a rank goes on with: `values` by name, as far as they are needed."""
        self._before = values
        self._seen = [place.state for place in self._places]

    def _take_from_first(self) -> None:
        buffers = [_value(place) for place in self._kept]
        sent = [each.to(torch.uint8) if each.dtype == torch.bool else each.clone() for each in buffers]
        for each in sent if self._mesh.ranks.process else ():
            each.zero_()  # a sum with zeros is the first process's value
        for buffer, value in zip(buffers, self._mesh.data_parallel.all_reduce(sent), strict=True):
            buffer.copy_(value)

    def _look(self) -> None:
        """Notes what was changed. Raises UsageError for a buffer that was replaced, or not changed in the first step,
        unless each process has one rank and keeps its own."""
        ranks = self._mesh.ranks
        kept = {place.name for place in self._kept}
        for place, (tensor, version) in zip(self._places, self._seen, strict=True):
            if place.state[0] != tensor or (place.state[1] != version and place.name not in kept):
                if ranks.given or ranks.total > ranks.processes:
                    raise UsageError(
                        f"{FIELD}: the buffer {place.name} is replaced, or changed in some steps only, so that logical "
                        f"ranks cannot each have their own; start {ranks.total} data parallel processes, and leave it "
                        "out"
                    )
                self._kept = [each for each in self._kept if each.name != place.name]
        if not self._learned:
            before = self._before
            self._changed |= {each.name for each in self._kept if not torch.equal(_value(each), before[each.name])}


def _value(place: _Place) -> Tensor:
    assert place.buffer is not None
    return place.buffer
