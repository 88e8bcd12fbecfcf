"""Collectives of lazy tensors across processes where PJRT has none (XLA's CPU client): through the host.

Each call runs pending operations, copies the operands to the host, reduces them with gloo and returns new device
buffers, so it splits the graph in two. All tensors of a call share one split.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stepmark.runtime.base import Runtime
from stepmark.runtime.collectives import GroupCollectives, OwnShard, Reduction


class BridgeCollectives:
    """See `Collectives`."""

    def __init__(self, runtime: Runtime, on_host: GroupCollectives) -> None:
        self._runtime = runtime
        self._on_host = on_host
        self.rank = on_host.rank
        self.size = on_host.size
        self._own = OwnShard(runtime, self.rank, self.size)

    def all_reduce(self, tensors: Sequence[Tensor], op: Reduction = "sum") -> list[Tensor]:
        return self._back(self._on_host.all_reduce(self._fetch(tensors), op))

    def all_gather(self, tensors: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
        return self._back(self._on_host.all_gather(self._fetch(tensors), dim))

    def reduce_scatter(self, tensors: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
        return self._back(self._on_host.reduce_scatter(self._fetch(tensors), dim))

    def own_shard(self, tensor: Tensor, dim: int = 0) -> Tensor:
        return self._own(tensor, dim)

    def _fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self._runtime.step_boundary()
        return self._runtime.to_host(tensors)

    def _back(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(self._runtime.place([tensor.contiguous() for tensor in tensors]))
