"""Which distribution an optimizer gets: by its class, by how its parameters are sharded, and by `zero_1`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from stepmark.errors import UsageError
from stepmark.parallel.full_sharding import is_fully_sharded
from stepmark.parallel.optimizer.elementwise import sharding_unit, updates_elements
from stepmark.parallel.optimizer.named import Distribution, Groups
from stepmark.parallel.optimizer.replicated import Replicated
from stepmark.parallel.optimizer.sharded import LocalShards
from stepmark.parallel.optimizer.whole_parameters import WholeParameters
from stepmark.parallel.optimizer.zero1_shards import FlatShards
from stepmark.runtime.base import Runtime
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.layout import layout_of


def distribute(
    groups: Groups,
    kind: type[torch.optim.Optimizer],
    runtime: Runtime,
    mesh: Mesh | None,
    *,
    order: Sequence[str] | None = None,
    zero_1: bool = False,
    master_weights: bool = True,
    bucket_elements: int | None = None,
) -> Distribution:
    """The tensors that an optimizer of this class updates on this rank. Collective.

    Args:
        groups: The optimizer's groups.
        kind: Its class.
        runtime: The device.
        mesh: The mesh that the parameters are on. None: without `zero_1`, and where none of them is sharded.
        order: See `Distribution`.
        zero_1: Divide the state over the data parallel ranks.
        master_weights: Update fp32 copies of parameters of another dtype. ZeRO-1 by elements does so in any case.
        bucket_elements: See `Distribution`.

    Raises:
        UsageError: The optimizer needs all parameters at once, or it is unknown what it needs, and they are sharded; or
            they would have to be whole where that is impossible.
    """
    parameters = [parameter for group in groups for _, parameter in group["params"]]
    if any(map(is_fully_sharded, parameters)):
        if zero_1:
            raise UsageError("zero_1 and fsdp: sharded parameters have sharded states already; leave zero_1 out")
        if sharding_unit(kind, "fsdp") != "element":
            raise UsageError(
                f"fsdp: {kind.__name__} uses complete parameters, and would see shards; use zero_1 instead"
            )
        return LocalShards(groups, runtime, order=order, master_weights=master_weights)
    field = "zero_1" if zero_1 else "tensor_parallel_size"
    sharded = any(layout_of(each) is not None for each in parameters)
    if (zero_1 or sharded) and sharding_unit(kind, field) == "parameter":
        assert mesh is not None
        if runtime.lazy:
            raise UsageError(
                f"zero_1: {kind.__name__} uses complete parameters, which each belong to one rank, and the ranks of "
                f"{runtime.name} run one graph; choose an elementwise optimizer, or switch zero_1 off"
            )
        return WholeParameters(
            groups,
            mesh,
            order=order,
            zero_1=zero_1,
            elementwise_group=partial(updates_elements, kind),
            master_weights=master_weights,
            bucket_elements=bucket_elements,
        )
    if zero_1:
        assert mesh is not None
        return FlatShards(groups, mesh, bucket_elements=bucket_elements)
    return Replicated(groups, runtime, order=order, master_weights=master_weights, bucket_elements=bucket_elements)
