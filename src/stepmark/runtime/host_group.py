"""Communication among ranks through the host: small plain values, never tensors of the model.

Every call is collective: all ranks of the group make it, in the same order.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from stepmark.runtime.process_groups import Group


class HostGroup:
    """All ranks of a run, connected by gloo; a single rank needs no connection."""

    def __init__(self, rank: int = 0, size: int = 1, process_group: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.size = size
        self._group = Group(process_group)

    @classmethod
    def of_processes(cls, timeout: timedelta | None = None) -> HostGroup:
        """The ranks of torch's default process group, on a separate gloo group; a single rank without one."""
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return cls()
        return cls(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=timeout))

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group.process_group)
        return values

    def broadcast(self, value: Any = None, source: int = 0) -> Any:
        """The value that rank `source` passed."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=source, group=self._group.process_group)
        return values[0]

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        self.all_gather(None)
