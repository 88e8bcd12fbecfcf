"""Every rank updates its shards of parameters that torch's `fully_shard` has sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from stepmark.parallel.gradients.exchange import ReducedShards
from stepmark.parallel.gradients.reducer import GradientReducer
from stepmark.parallel.gradients.shard_sums import ShardSums
from stepmark.parallel.optimizer.named import Groups
from stepmark.parallel.optimizer.replicated import Replicated
from stepmark.runtime.base import Runtime
from stepmark.runtime.collectives import GroupCollectives
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.dtensor import layout_of_dtensor
from stepmark.sharding.layout import annotate


class LocalShards(Replicated):
    """The local tensors of sharded parameters, with fp32 master weights for bf16 ones; see `Replicated`."""

    divided_by: str | None = "fsdp"

    def __init__(
        self, groups: Groups, runtime: Runtime, *, order: Sequence[str] | None = None, master_weights: bool = True
    ) -> None:
        self._sharded = {name: parameter for group in groups for name, parameter in group["params"]}
        self._local = {name: _local(parameter) for name, parameter in self._sharded.items()}
        local = [{**group, "params": [(name, self._local[name]) for name, _ in group["params"]]} for group in groups]
        super().__init__(local, runtime, order=order, master_weights=master_weights)
        self.parameters = [self._sharded[name] for name in self.names]

    def gradients(
        self, mesh: Mesh, *, accumulation: int, reduce_dtype: torch.dtype | None, on_arrival: bool
    ) -> GradientReducer:
        """torch makes a gradient as soon as it arrives, whatever the accumulation is."""
        axis = mesh.data_parallel
        assert isinstance(axis, GroupCollectives)
        sums = ShardSums(self.parameters, axis, reduce_dtype or torch.float32)
        return GradientReducer(sums, ReducedShards(mesh), mesh)

    def follow(self) -> None:
        """torch gives an uneven shard new memory in the first forward pass and in `load_state_dict`."""
        for name, parameter in self._sharded.items():
            there, known = parameter._local_tensor, self._local[name]
            if there.untyped_storage()._cdata != known.untyped_storage()._cdata:
                known.data = there.detach()
        super().follow()


def _local(parameter: Any) -> nn.Parameter:
    """The parameter's shard, in the same memory."""
    local = nn.Parameter(parameter._local_tensor.detach(), requires_grad=parameter.requires_grad)
    annotate(local, layout_of_dtensor(parameter))
    return local
