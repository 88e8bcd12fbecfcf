"""Collectives of lazy tensors across processes where PJRT has none (XLA's CPU client): through the host.

Each call runs what is pending, copies the operands to the host, reduces them with gloo and gives back new device
buffers, so it cuts the graph in two. All tensors of a call share one cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from stepmark.runtime.base import Runtime


class BridgeCollectives:
    """See `Collectives`."""

    def __init__(self, runtime: Runtime, group: dist.ProcessGroup | None = None) -> None:
        self._runtime = runtime
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_reduce(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self._runtime.step_boundary()
        on_host = self._runtime.to_host(tensors)
        for tensor in on_host:
            dist.all_reduce(tensor, group=self._group)
        return list(self._runtime.place(on_host))
