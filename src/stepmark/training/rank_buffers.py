"""The buffers of a model that training changes, such as BatchNorm's statistics, where processes host logical ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from stepmark.runtime.mesh import Mesh


class _Place(NamedTuple):
    name: str
    module: nn.Module
    key: str

    @property
    def buffer(self) -> Any:
        return self.module._buffers[self.key]

    @property
    def persistent(self) -> bool:
        return self.key not in self.module._non_persistent_buffers_set

    @property
    def state(self) -> tuple[int, int]:
        """Differs once the buffer was written to, or replaced."""
        return id(self.buffer), -1 if self.buffer is None else self.buffer._version


class RankBuffers:
    """Every logical rank begins a step with the same buffers, and those of rank 0 are kept: these are also what
    checkpoints have. So a step does not depend on which process hosts a rank.

    Which buffers change is learned in a process's first step, by their values: torch does not count what BatchNorm
    writes. Buffers that checkpoints do not have, or that are replaced, are each process's own, such as a table for the
    longest sequence so far; where they change, each rank needs a process.
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
        several = self._mesh.ranks.most > 1  # also of a process that takes part in passes of others
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
            place.buffer.copy_(values[place.name])
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
        return {place.name: place.buffer.clone() for place in self._kept}

    def _note(self, values: dict[str, Tensor]) -> None:
        """Notes what a rank goes on with: `values` by name, as far as they are needed."""
        self._before = values
        self._seen = [place.state for place in self._places]

    def _take_from_first(self) -> None:
        buffers = [place.buffer for place in self._kept]
        zeros = self._mesh.ranks.process > 0  # a sum with zeros is the first process's bytes
        sent = [torch.zeros_like(each) if zeros else each.clone() for each in map(_bytes, buffers)]
        for buffer, value in zip(buffers, self._mesh.data_parallel.all_reduce(sent), strict=True):
            buffer.copy_(value.view(buffer.dtype).view(buffer.shape))

    def _look(self) -> None:
        """Notes what was changed since this rank's passes began. Raises UsageError where a process hosts several ranks
        and one has changed a buffer that is not kept."""
        kept = {place.name for place in self._kept}
        for place, (tensor, version) in zip(self._places, self._seen, strict=True):
            changed = not self._learned and not _equal(place.buffer, self._before[place.name])
            replaced = place.state[0] != tensor
            if replaced or (changed and not place.persistent) or (place.state[1] != version and place.name not in kept):
                self._mesh.keep_one_rank(
                    f"the buffer {place.name} is replaced, in no checkpoint, or changed in some steps only"
                )
            elif changed:
                self._changed.add(place.name)


def _equal(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.shape == other.shape and torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    """Which backends send, and compare, whatever the type is."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
