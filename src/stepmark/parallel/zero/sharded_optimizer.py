"""ZeRO-1: every data parallel rank keeps the optimizer's state of one part of the parameters, and updates that part.

Rajbhandari et al. 2020, stage 1. The parameters of a group lie end to end in buckets, each cut evenly among the ranks;
the optimizer works on this rank's part of each bucket, a flat tensor, so any elementwise optimizer does. One
reduce-scatter a bucket brings the gradients, one all-gather the new values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.optim.elementwise import check_elementwise
from stepmark.optim.wrapped import load_rates, plain, take_empty_step
from stepmark.parallel.zero.buckets import Bucket, make_buckets, whole_on_host
from stepmark.parallel.zero.sharded_gradients import ShardedGradients
from stepmark.runtime.collectives import gather_in_place
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.layout import Shard

MASTER = "master"


class ShardedOptimizer:
    """An elementwise `torch.optim` optimizer over this rank's part, with the state keyed by parameter names.

    Where parameters are not fp32, the optimizer works on fp32 master weights, of this rank's part only, which are
    saved. `groups`: as for `torch.optim`, but "params" is a list of (name, parameter). `make` gets the groups with the
    flat parts that the optimizer is to work on. The state is never materialized whole.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        mesh: Mesh,
    ) -> None:
        self._mesh = mesh
        self._runtime = mesh.runtime
        self._axis = mesh.data_parallel
        named = [group["params"] for group in groups]
        self.buckets = make_buckets(named, self._axis, mesh.tensor_parallel.size, self._runtime)
        self.names = [member.name for bucket in self.buckets for member in bucket.members]
        self.parameters = [member.parameter for bucket in self.buckets for member in bucket.members]
        self._flat: list[Tensor | None] = [self._lay_out(bucket) for bucket in self.buckets]
        self._parts = [self._part(bucket, flat) for bucket, flat in zip(self.buckets, self._flat, strict=True)]
        inner_groups = [
            {**group, "params": [p for b, p in zip(self.buckets, self._parts, strict=True) if b.group == index]}
            for index, group in enumerate(groups)
        ]
        self.inner = make(inner_groups)
        check_elementwise(type(self.inner))

    @torch.no_grad()
    def _lay_out(self, bucket: Bucket) -> Tensor | None:
        """On an eager device, makes the parameters views of one flat tensor: the parts are then sent and received
        without a copy. Every Parameter stays the object it is. One whose elements lie in another order in the bucket
        keeps memory of its own."""
        if self._runtime.lazy:
            return None
        flat = torch.zeros(bucket.padded, dtype=bucket.dtype, device=self._runtime.device)
        for member in bucket.members:
            member.write_to(flat)
            if member.in_order:
                member.parameter.data = member.places_in(flat)[0]
        return flat

    def _part(self, bucket: Bucket, flat: Tensor | None) -> nn.Parameter:
        """What the optimizer works on: fp32, `bucket.part` elements."""
        begin = self._axis.rank * bucket.part
        if flat is not None and bucket.dtype == torch.float32:
            return nn.Parameter(flat[begin : begin + bucket.part])
        part = whole_on_host(bucket, self._runtime)[begin : begin + bucket.part].clone()
        return nn.Parameter(self._runtime.place(part))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    def gradients(self, mesh: Mesh, *, accumulation: int, travel_in_fp32: bool = True) -> ShardedGradients:
        """What gathers the gradients that `set_gradients` takes."""
        return ShardedGradients(self.buckets, mesh, accumulation=accumulation, travel_in_fp32=travel_in_fp32)

    def set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Gives each bucket's part its gradient (fp32), or None."""
        for part, gradient in zip(self._parts, gradients, strict=True):
            part.grad = gradient

    @torch.no_grad()
    def step(self) -> None:
        """Updates this rank's part, and gives all ranks the new values."""
        for bucket, flat in zip(self.buckets, self._flat, strict=True):
            for member in bucket.members:
                if flat is not None and bucket.dtype == torch.float32 and not member.in_order:
                    member.write_to(flat)  # somebody may have changed it, which is seen at once in those in order
        self.inner.step()
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        """On an eager device each rank's part goes to its place in the flat tensors, of which the parameters are views,
        and from there to the other ranks."""
        if self._runtime.lazy:
            sent = [part.detach().to(bucket.dtype) for bucket, part in zip(self.buckets, self._parts, strict=True)]
            whole = self._axis.all_gather(sent)
        else:
            whole = [flat for flat in self._flat if flat is not None]
            for flat, part in zip(whole, self._parts, strict=True):
                if flat.dtype != part.dtype:
                    self._axis.own_part(flat).copy_(part)
            gather_in_place(self._axis, whole)
        for bucket, flat in zip(self.buckets, whole, strict=True):
            for member in bucket.members:
                if self._runtime.lazy or not member.in_order:
                    member.read_from(flat)

    def ensure_state(self) -> None:
        """Creates state that the optimizer would make in its first step, so that it can be restored in place.

        Its values mean nothing: call it only when they are about to be replaced.
        """
        if all(part in self.inner.state for part in self._parts):
            return
        saved = [part.detach().clone() for part in self._parts]
        take_empty_step(self.inner, self._parts, self._runtime)
        with torch.no_grad():
            for part, value in zip(self._parts, saved, strict=True):
                part.copy_(value)
        self._runtime.step_boundary()

    # What is saved

    def named_state(self) -> dict[str, dict[str, Any]]:
        """Parameter name to state: this rank's slices of the live tensors, what is the same for a whole parameter, and
        `master` where there is one."""
        states: dict[str, dict[str, Any]] = {name: {} for name in self.names}
        for bucket, part in zip(self.buckets, self._parts, strict=True):
            held = dict(self.inner.state.get(part, {}))
            if bucket.dtype != torch.float32:
                held[MASTER] = part
            layouts = list(bucket.local_layouts())
            for key, value in held.items():
                if isinstance(value, Tensor) and value.shape == part.shape and value.dim() == 1:
                    for member, layout in layouts:
                        states[member.name][key] = Shard(value, layout)
                else:
                    for member in bucket.members:
                        states[member.name][key] = value
        return states

    def named_groups(self) -> list[dict[str, Any]]:
        """The groups' plain hyperparameters, with parameter names in place of tensors."""
        return [
            {key: self._names_in(index) if key == "params" else plain(value) for key, value in group.items()}
            for index, group in enumerate(self.param_groups)
        ]

    def _names_in(self, group: int) -> list[str]:
        return [member.name for bucket in self.buckets if bucket.group == group for member in bucket.members]

    def load_named_groups(self, groups: list[dict[str, Any]]) -> None:
        """Takes up the saved learning rates, and the parameters' restored values."""
        load_rates(self.inner, groups, self._runtime)
        self.take_up_parameters()

    def take_up_parameters(self) -> None:
        """Makes the working copies of fp32 parameters, which a lazy device has, what the parameters are now."""
        for bucket, flat, part in zip(self.buckets, self._flat, self._parts, strict=True):
            if flat is None and bucket.dtype == torch.float32:
                begin = self._axis.rank * bucket.part
                self._runtime.write(part, whole_on_host(bucket, self._runtime)[begin : begin + bucket.part].clone())

    def state_bytes(self) -> int:
        """Bytes of optimizer state that this rank holds, master weights included."""
        tensors = [value for part in self._parts for value in self.inner.state.get(part, {}).values()]
        masters = [p for b, p in zip(self.buckets, self._parts, strict=True) if b.dtype != torch.float32]
        return sum(value.nbytes for value in (*tensors, *masters) if isinstance(value, Tensor))
