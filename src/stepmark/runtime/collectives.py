"""The few operations between ranks that parallel code needs, in three ways.

| way                   | where                                                   | in the graph |
| --------------------- | ------------------------------------------------------- | ------------ |
| `GroupCollectives`    | eager devices: a torch.distributed group (gloo, nccl)   | no graph     |
| `GraphCollectives`    | XLA with collectives in PJRT: Neuron, TPU, CPU threads  | yes          |
| `BridgeCollectives`   | XLA's CPU client, one process per rank (host_bridge.py) | cuts it      |

Buffers belong to the caller; a result may share memory with its input, which is not to be used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor


class Collectives(Protocol):
    """One axis of the mesh, seen from one rank: its coordinate and its size."""

    rank: int
    size: int

    def all_reduce(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sums over the ranks of the axis, tensor by tensor, same shapes and dtypes on every rank."""


class NoCollectives:
    """An axis of size 1."""

    rank = 0
    size = 1

    def all_reduce(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)


class GroupCollectives:
    """An axis whose ranks form a torch.distributed group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_reduce(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        works = [dist.all_reduce(tensor, group=self._group, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()
        return list(tensors)


class GraphCollectives:
    """An axis of XLA replicas. Every replica records the same operations, with the groups of the whole axis."""

    def __init__(self, rank: int, size: int, groups: list[list[int]] | None = None) -> None:
        self.rank = rank
        self.size = size
        self._groups = groups

    def all_reduce(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        from stepmark.runtime.xla import all_reduce_in_graph

        return [all_reduce_in_graph(tensor, self._groups) for tensor in tensors]
