"""What the passes of a model change in it, such as BatchNorm's statistics, where there are several logical ranks."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from stepmark.errors import UsageError
from stepmark.parallel.optimizer.named import NUMBERS
from stepmark.runtime.mesh import Mesh
from stepmark.runtime.module_placement import checksum
from stepmark.sharding.dtensor import is_dtensor
from stepmark.sharding.views import flat_bytes

PARAMETER, BUFFER, LARGE, OWN = "parameter", "buffer", "large buffer", "buffer, which is in no checkpoint,"
LARGE_TOTAL = 256 << 20  # bytes of all buffers above which they are more than statistics, such as quantized weights
LARGE_SIZE = 1 << 20  # bytes above which one of these is large

logger = logging.getLogger("stepmark")


class _Place(NamedTuple):
    name: str
    module: nn.Module
    key: str
    kind: str

    @property
    def tensor(self) -> Any:
        return (self.module._parameters if self.kind == PARAMETER else self.module._buffers).get(self.key)


def _kind_of(module: nn.Module, key: str, tensor: Tensor, total: int) -> str:
    """`total`: bytes of all buffers of the model."""
    if key in module._parameters:
        return PARAMETER
    if key in module._non_persistent_buffers_set:
        return OWN
    return LARGE if total > LARGE_TOTAL and tensor.nbytes > LARGE_SIZE else BUFFER


class RankBuffers:
    """Every logical rank begins a step with the same buffers, and those of rank 0 are kept: these are also what
    checkpoints have. So a step does not depend on which process hosts a rank. All of them are sent in every step: torch
    does not count what BatchNorm writes, and a buffer may change in some steps only.

    Numbers that modules keep are a logical rank's while it is hosted, and no process's are sent to another.

    Parameters to which a forward pass writes, as that of a teacher does, and large buffers where there are many, are
    treated alike where it does so in a process's first step; of frozen parameters, values are compared in it. Buffers
    that checkpoints do not have are each process's own. Where one of these changes, each rank needs a process. Raises
    UsageError where rows of embeddings would depend on which rank has looked them up.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._mesh = mesh
        ranks = mesh.ranks
        parts = list(model.named_modules()) if ranks.total > 1 else []
        self._modules = [part for _, part in parts]
        renormed = next((name for name, part in parts if getattr(part, "max_norm", None) is not None), None)
        if renormed is not None:
            raise UsageError(
                f"model: {renormed} has max_norm, by which each of the {ranks.total} data parallel ranks changes the "
                "rows that it looks up; leave max_norm out, and scale the rows in on_step_end"
            )
        total = sum(buffer.nbytes for buffer in model.buffers())
        self._places = [
            _Place(f"{name}.{key}".lstrip("."), module, key, _kind_of(module, key, tensor, total))
            for name, module in parts
            for key, tensor in (*module._buffers.items(), *module._parameters.items())
            if tensor is not None and not is_fake(tensor) and not is_dtensor(tensor)  # fake ones have no values
        ]
        self._kept = [place for place in self._places if place.kind == BUFFER]  # and others that the passes write to
        self._learned = not parts
        self._numbers: list[tuple[dict[str, Any], str]] = []  # that modules keep, such as a count of their passes
        self._changed: set[str] = set()  # others to which the passes of this process have written
        self._sends = mesh.runtime.numbers([float(ranks.process == 0)])  # a branch would make graphs of its own

    def begin(self) -> None:
        """Begins a step, with this process's first rank."""
        self._rank = 0
        self._values: dict[int, tuple[list[Tensor], list[Any]]] = {}  # of each rank whose passes were begun here
        if self._mesh.ranks.most > 1:  # also in a process that takes part in passes of others
            if not self._learned:
                owners = [part.__dict__ for part in self._modules]
                self._numbers = [(own, key) for own in owners for key, value in own.items() if type(value) in NUMBERS]
            self._first = self._now()
        self._seen = self._states()

    @torch.no_grad()
    def enter(self, rank: int) -> None:
        """Goes on with the rank of this process that has the number `rank` in it."""
        if rank == self._rank:
            return
        self._look()
        self._values[self._rank] = self._now()
        tensors, numbers = self._values.get(rank, self._first)
        for place, value in zip(self._kept, tensors, strict=True):
            place.tensor.copy_(value)
        for (own, key), number in zip(self._numbers, numbers, strict=True):
            own[key] = number
        self._rank, self._seen = rank, self._states()

    def end(self) -> None:
        """Ends a step. Collective."""
        self._look()
        self.enter(0)
        if not self._learned:
            names = {name for told in self._mesh.context.host.all_gather(sorted(self._changed)) for name in told}
            self._kept = [place for place in self._places if place.kind == BUFFER or place.name in names]
            self._learned = True
        if self._mesh.ranks.processes > 1 and self._kept:
            self._take_from_first([place.tensor for place in self._kept])

    def _now(self) -> tuple[list[Tensor], list[Any]]:
        return [place.tensor.clone() for place in self._kept], [own.get(key) for own, key in self._numbers]

    def _states(self) -> dict[_Place, object]:
        """Of what may be written to: each differs once it was; of saved buffers, which may be, once they do not fit any
        more. After the first step trained parameters are left out, of which new values may still arrive."""
        runtime, found = self._mesh.runtime, dict[_Place, object]()
        for place in self._places:
            tensor = place.tensor
            frozen = place.kind == PARAMETER and tensor is not None and not tensor.requires_grad
            if tensor is None or place.kind == BUFFER:
                found[place] = tensor is not None and (tensor.shape, tensor.dtype)
            elif frozen or place.kind != PARAMETER or not self._learned:
                compared = frozen and not self._learned and not runtime.lazy
                values = checksum(runtime.to_host([tensor], copy=False)[0]) if compared else ""
                found[place] = id(tensor), runtime.version(tensor), values
        return found

    @torch.no_grad()
    def _take_from_first(self, tensors: list[Tensor]) -> None:
        """A sum with zeros is the first process's value."""
        lazy = self._mesh.runtime.lazy
        sent = [_on_lazy(each) for each in tensors] if lazy else [torch.cat([*map(flat_bytes, tensors)])]
        found = self._mesh.data_parallel.all_reduce([torch.where(self._sends > 0, s, s.new_zeros(())) for s in sent])
        if not lazy:
            pairs = zip(found[0].split([each.nbytes for each in tensors]), tensors, strict=True)
            found = [part.clone().view(tensor.dtype) for part, tensor in pairs]
        for tensor, value in zip(tensors, found, strict=True):
            tensor.copy_(value.view(tensor.shape))

    def _look(self) -> None:
        """Notes what was changed since this rank's passes began. Raises UsageError where a buffer does not fit any
        more, or a process hosts several ranks and one has changed what is not kept for each."""
        now = self._states()
        for place in [place for place, state in self._seen.items() if now.get(place) != state]:
            if place.kind == BUFFER:
                raise UsageError(
                    f"model: the buffer {place.name} gets another shape or dtype in the passes of a step, so that no "
                    "checkpoint could be restored; keep both, or register it with persistent=False"
                )
            reason = f"the {place.kind} {place.name} is written to in the passes of a step"
            self._mesh.keep_one_rank(reason)
            if place.kind == OWN:
                continue
            if self._learned and place not in self._kept and place.name not in self._changed:
                own = "each data parallel rank keeps its own, and a resumed run has rank 0's"
                logger.warning("%s, but not of the first: %s; do so in every step, or in a buffer", reason, own)
            self._changed.add(place.name)


def _on_lazy(tensor: Tensor) -> Tensor:
    """In a dtype of which collectives of graphs add values; exact."""
    if tensor.itemsize >= 4:
        return tensor.detach()
    return tensor.detach().to(torch.float32 if tensor.is_floating_point() else torch.int32)
