"""Every rank updates all of its parameters, or its shards of those that torch's `fully_shard` has sharded, with fp32
master weights for bf16 ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from stepmark.parallel.buckets import check_real
from stepmark.parallel.full_sharding import reduced_by_pass
from stepmark.parallel.gradients.accumulators import ShardAccumulator
from stepmark.parallel.gradients.exchange import ReducedShards
from stepmark.parallel.gradients.reducer import GradientReducer
from stepmark.parallel.optimizer.named import Groups, OptimizerSharding, OptimizerTensor
from stepmark.runtime.base import Runtime
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.dtensor import layout_of_dtensor
from stepmark.sharding.layout import annotate, layout_of


class WrittenParameters:
    """Which parameters of a lazy device were written by anything but the optimizer, such as `load_state_dict`. On eager
    devices values are compared (`follow`): torch does not count what is written to `parameter.data`."""

    def __init__(self, parameters: Sequence[Tensor], runtime: Runtime) -> None:
        self._runtime = runtime
        self._parameters = list(parameters) if runtime.lazy else []
        self.forget()

    def forget(self) -> None:
        """From here on writes count; call it after the optimizer's own."""
        self._versions = [self._runtime.version(parameter) for parameter in self._parameters]

    def found(self) -> list[Tensor]:
        """Those that were written since."""
        pairs = zip(self._parameters, self._versions, strict=True)
        return [parameter for parameter, version in pairs if self._runtime.version(parameter) != version]


@torch.no_grad()
def follow(master: Tensor, parameter: Tensor) -> Tensor:
    """The fp32 master with the values of a parameter that was written, in place: the parameter's, where the two are not
    the same up to rounding. Both have one shape and device; nothing waits for that."""
    rounded = master.to(parameter.dtype)
    known = parameter.device.type == "cpu" and not is_fake(parameter)
    if not (known and torch.equal(rounded, parameter)):
        master.copy_(torch.where(rounded == parameter, master, parameter.float()))
    return master


class Replicated(OptimizerSharding):
    """All parameters. Where one is not fp32 and `master_weights` is set, the optimizer updates an fp32 copy, and the
    parameter is that copy rounded. For the other arguments see `OptimizerSharding`; `runtime` is the device."""

    def __init__(
        self,
        groups: Groups,
        runtime: Runtime,
        *,
        order: Sequence[str] | None = None,
        master_weights: bool = True,
        bucket_elements: int | None = None,
    ) -> None:
        super().__init__(groups, order=order, bucket_elements=bucket_elements)
        self._runtime = runtime
        self.by_pass = bool(self.parameters) and all(map(reduced_by_pass, self.parameters))
        self.fuses = not (self.by_pass and runtime.host_memory)
        parameters = dict(zip(self.names, self.parameters, strict=True))
        self.held = [
            self._hold(name, parameters[name], number, master_weights)
            for number, names in enumerate(self.groups)
            for name in names
        ]
        self._masters = [(parameters[str(held.key)], held.tensor) for held in self.held if held.master]
        self._written = WrittenParameters([parameter for parameter, _ in self._masters], runtime)

    def gradients(
        self, mesh: Mesh, *, accumulation: int, reduce_dtype: torch.dtype | None, on_arrival: bool
    ) -> GradientReducer:
        """torch makes the gradient of a shard as soon as it arrives, whatever the accumulation is."""
        if not self.by_pass or not (mesh.data_parallel.size > 1 or mesh.ranks.fixed):
            return super().gradients(mesh, accumulation=accumulation, reduce_dtype=reduce_dtype, on_arrival=on_arrival)
        sums = ShardAccumulator(self.names, self.parameters, mesh.ranks, reduce_dtype or torch.float32)
        return GradientReducer(sums, ReducedShards(mesh), mesh)

    def _hold(self, name: str, parameter: nn.Parameter, group: int, master_weights: bool) -> OptimizerTensor:
        check_real(name, parameter)
        members = ((name, layout_of(parameter)),)
        if not master_weights or parameter.dtype == torch.float32:
            return OptimizerTensor(parameter, group, members, master=False, key=name)
        (on_host,) = self._runtime.to_host([parameter])
        return OptimizerTensor(
            nn.Parameter(self._runtime.place(on_host.float())), group, members, master=True, key=name
        )

    def follow(self) -> None:
        written = {id(parameter) for parameter in self._written.found()}
        for parameter, master in self._masters:
            if not self._runtime.lazy:
                follow(master, parameter)
            elif id(parameter) in written:
                self._runtime.write(master, follow(*self._runtime.to_host([master, parameter])))

    def publish(self) -> None:
        for parameter, master in self._masters:
            parameter.copy_(master)
        self._written.forget()


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
        self.by_pass, self.fuses = True, not runtime.host_memory

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
