"""What the passes of a model change in it, such as BatchNorm's statistics, where there are several logical ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from stepmark.errors import UsageError
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.dtensor import is_dtensor


class _Place(NamedTuple):
    name: str
    module: nn.Module
    key: str
    parameter: bool

    @property
    def tensor(self) -> Any:
        return (self.module._parameters if self.parameter else self.module._buffers)[self.key]

    @property
    def persistent(self) -> bool:
        return self.key not in self.module._non_persistent_buffers_set

    @property
    def state(self) -> tuple[int, int]:
        """Differs once the tensor was written to, or replaced."""
        return id(self.tensor), -1 if self.tensor is None else self.tensor._version


class RankBuffers:
    """Every logical rank begins a step with the same buffers, and those of rank 0 are kept: these are also what
    checkpoints have. So a step does not depend on which process hosts a rank.

    Which buffers change is learned in a process's first step, by their values: torch does not count what BatchNorm
    writes. Buffers that checkpoints do not have, or that get another shape, are each process's own, such as a table for
    the longest sequence so far; where they change, each rank needs a process. So it does where a forward pass writes to
    parameters, as that of a teacher does, which are otherwise treated like buffers. Raises UsageError where rows of
    embeddings would depend on which rank has looked them up.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._mesh = mesh
        ranks = mesh.ranks
        self._needed = ranks.total > 1 and not mesh.runtime.lazy
        parts = list(model.named_modules()) if ranks.total > 1 else []
        renormed = next((name for name, part in parts if getattr(part, "max_norm", None) is not None), None)
        if renormed is not None:
            raise UsageError(
                f"model: {renormed} has max_norm, by which each of the {ranks.total} data parallel ranks changes the "
                "rows that it looks up; leave max_norm out, and scale the rows in on_step_end"
            )
        self._places = [
            _Place(f"{name}.{key}".lstrip("."), module, key, of_parameters)
            for name, module in parts
            for of_parameters, tensors in ((False, module._buffers), (True, module._parameters))
            for key, tensor in tensors.items()  # of which fake ones have no values that could change
            if self._needed and tensor is not None and not is_fake(tensor) and not is_dtensor(tensor)
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

    @torch.no_grad()
    def enter(self, rank: int) -> None:
        """Goes on with the rank of this process that has the number `rank` in it."""
        if rank == self._rank:
            return
        self._look()
        self._values[self._rank] = self._copies()
        values = self._values.get(rank, self._first)
        for place in (each for each in self._kept if not each.parameter):
            place.tensor.copy_(values[place.name])
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
            self._places = [place for place in self._places if not place.parameter]
        if self._mesh.ranks.processes > 1 and self._kept:
            self._take_from_first()

    def _copies(self) -> dict[str, Tensor]:
        return {place.name: place.tensor.clone() for place in self._kept if not place.parameter}

    def _note(self, values: dict[str, Tensor]) -> None:
        """Notes what a rank goes on with: `values` by name, as far as they are needed."""
        self._before = values
        self._seen = [place.state for place in self._places]

    @torch.no_grad()
    def _take_from_first(self) -> None:
        buffers = [place.tensor for place in self._kept]
        zeros = self._mesh.ranks.process > 0  # a sum with zeros is the first process's bytes
        sent = [torch.zeros_like(each) if zeros else each.clone() for each in map(_bytes, buffers)]
        for buffer, value in zip(buffers, self._mesh.data_parallel.all_reduce(sent), strict=True):
            buffer.copy_(value.view(buffer.dtype).view(buffer.shape))

    def _look(self) -> None:
        """Notes what was changed since this rank's passes began. Raises UsageError where a process hosts several ranks
        and one has changed what is not kept for each."""
        kept = {place.name for place in self._kept}
        for place, state in zip(self._places, self._seen, strict=True):
            written, before = place.state != state, self._before.get(place.name)
            changed = written if before is None else not self._learned and not _equal(place.tensor, before)
            fits = before is None or (place.tensor is not None and _like(place.tensor, before))
            if written and place.parameter:
                self._mesh.keep_one_rank(f"the parameter {place.name} is written to in the passes of a step")
            elif not fits or (changed and not place.persistent) or (written and place.name not in kept):
                self._mesh.keep_one_rank(
                    f"the buffer {place.name} gets another shape, is in no checkpoint, or changed in some steps only"
                )
            if changed and fits and place.persistent:
                self._changed.add(place.name)


def _equal(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and _like(one, other) and torch.equal(_bytes(one), _bytes(other))


def _like(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def _bytes(tensor: Tensor) -> Tensor:
    """Which backends send, and compare, whatever the type is."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
