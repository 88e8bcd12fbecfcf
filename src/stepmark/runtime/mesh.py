"""The mesh: how the ranks of a run are divided among data and tensor parallelism.

Ranks of one tensor parallel group are neighbours (rank = dp * tensor_parallel_size + tp), so that the most talkative
axis stays inside a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from stepmark.errors import UsageError
from stepmark.runtime.base import Runtime
from stepmark.runtime.collectives import Collectives, GraphCollectives, GroupCollectives, NoCollectives
from stepmark.runtime.context import TIMEOUT, Context, quiet_stdout, start


@dataclass(frozen=True)
class Mesh:
    """The axes, each as seen from this rank. Make it with `create`, on all ranks together."""

    context: Context
    data_parallel: Collectives
    tensor_parallel: Collectives
    _replicas: dict[int, Collectives] = field(default_factory=dict)

    @classmethod
    def create(cls, *, tensor_parallel_size: int = 1, device: str = "auto", context: Context | None = None) -> Mesh:
        """Joins the other ranks, where that has not happened, and divides them; data parallel is what remains.

        Raises UsageError where the number of ranks is no multiple of `tensor_parallel_size`.
        """
        context = context or start(device)
        size = context.world.size
        if tensor_parallel_size < 1 or size % tensor_parallel_size:
            raise UsageError(
                f"tensor_parallel_size: {tensor_parallel_size} does not divide the {size} ranks; start a multiple of "
                f"{max(tensor_parallel_size, 1)} ranks, or choose a divisor of {size}"
            )
        rows = [list(range(first, first + tensor_parallel_size)) for first in range(0, size, tensor_parallel_size)]
        columns = [list(column) for column in zip(*rows, strict=True)]
        data = context.data_parallel if tensor_parallel_size == 1 else _axis(context, columns)
        return cls(context, data, _axis(context, rows))

    @property
    def runtime(self) -> Runtime:
        return self.context.runtime

    @property
    def shape(self) -> dict[str, int]:
        """Axis to size, as checkpoints note it."""
        return {"dp": self.data_parallel.size, "tp": self.tensor_parallel.size}

    def replicas(self, count: int) -> Collectives:
        """The axis of `count` neighbours on the tensor parallel axis, which hold the same slice of some tensors.

        `count` divides the axis. Collective at the first call for a count.
        """
        if count not in self._replicas:
            size = self.context.world.size
            groups = [list(range(first, first + count)) for first in range(0, size, count)]
            whole = count == self.tensor_parallel.size
            self._replicas[count] = self.tensor_parallel if whole else _axis(self.context, groups)
        return self._replicas[count]


def _axis(context: Context, groups: Sequence[list[int]]) -> Collectives:
    """This rank's axis, of those into which `groups` divide all ranks."""
    own = next(group for group in groups if context.world.rank in group)
    if len(own) == 1:
        return NoCollectives()
    runtime = context.runtime
    if getattr(runtime, "in_graph_collectives", False):
        return GraphCollectives(runtime, own.index(context.world.rank), len(own), list(groups))
    with quiet_stdout():
        made = [dist.new_group(group, timeout=TIMEOUT) for group in groups]
    mine = made[groups.index(own)]
    if not runtime.lazy:
        return GroupCollectives(mine)
    from stepmark.runtime.host_bridge import BridgeCollectives

    return BridgeCollectives(runtime, mine)
