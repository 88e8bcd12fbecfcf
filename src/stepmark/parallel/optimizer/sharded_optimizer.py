"""ZeRO-1: every data parallel rank keeps the optimizer state of one shard of the parameters, and updates that shard.

Rajbhandari et al. 2020, stage 1. The parameters of a group are concatenated in buckets, each sharded evenly over the
ranks. The optimizer works on this rank's shard of each bucket, a flat tensor, so it can be any elementwise optimizer.
Per bucket and step there is one reduce-scatter of gradients and one all-gather of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.errors import UsageError
from stepmark.parallel.buckets import Bucket, complete_on_host, make_buckets
from stepmark.parallel.gradients.reducer import GradientReducer, sharded_gradients
from stepmark.parallel.optimizer.arrivals import Arrivals
from stepmark.parallel.optimizer.elementwise import check_elementwise
from stepmark.parallel.optimizer.master_weights import WrittenParameters, follow
from stepmark.parallel.optimizer.wrapped import (
    load_hyperparameters,
    load_learning_rates,
    load_plain_values,
    plain,
    take_empty_step,
)
from stepmark.runtime.collectives import start_gather_in_place
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.layout import Shard

MASTER = "master"


class ShardedOptimizer:
    """An elementwise `torch.optim` optimizer over this rank's shards, with state keyed by parameter name.

    Where parameters are not fp32, the optimizer works on fp32 master weights of this rank's shards, which are saved.
    The complete state is never materialized.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        mesh: Mesh,
        *,
        bucket_elements: int | None = None,
    ) -> None:
        """`groups`: as for `torch.optim`, but "params" is a list of (name, parameter). `make` creates the optimizer
        from groups with this rank's flat shards. `bucket_elements`: size limit of a bucket; None: by the device."""
        self._mesh = mesh
        self._runtime = mesh.runtime
        self._axis = mesh.data_parallel
        named = [group["params"] for group in groups]
        self.buckets = make_buckets(named, self._axis, mesh.tensor_parallel.size, self._runtime, bucket_elements)
        self.names = [member.name for bucket in self.buckets for member in bucket.members]
        self.parameters = [member.parameter for bucket in self.buckets for member in bucket.members]
        if not self._runtime.lazy:
            _check_memory(self.names, self.parameters)
        self._flat: list[Tensor | None] = [self._lay_out(bucket) for bucket in self.buckets]
        self._shards = [self._make_shard(bucket, flat) for bucket, flat in zip(self.buckets, self._flat, strict=True)]
        inner_groups = [
            {**group, "params": [p for b, p in zip(self.buckets, self._shards, strict=True) if b.group == index]}
            for index, group in enumerate(groups)
        ]
        self.inner = make(inner_groups)
        check_elementwise(type(self.inner))
        self._written = [
            WrittenParameters([m.parameter for m in bucket.members], self._runtime) for bucket in self.buckets
        ]
        self.arrivals = Arrivals([[member.parameter for member in bucket.members] for bucket in self.buckets])

    @torch.no_grad()
    def _lay_out(self, bucket: Bucket) -> Tensor | None:
        """On an eager device, makes the parameters views of one flat tensor, so that shards are sent and received
        without a copy. Every Parameter stays the same object. One whose elements have another order in the bucket keeps
        its own memory."""
        if self._runtime.lazy:
            return None
        flat = torch.zeros(bucket.padded, dtype=bucket.dtype, device=self._runtime.device)
        for member in bucket.members:
            member.write_to(flat)
            if member.in_order:
                member.parameter.data = member.places_in(flat)[0]
        return flat

    def _make_shard(self, bucket: Bucket, flat: Tensor | None) -> nn.Parameter:
        """The tensor that the optimizer updates: fp32, `bucket.shard_size` elements."""
        begin = self._axis.rank * bucket.shard_size
        if flat is not None and bucket.dtype == torch.float32:
            return nn.Parameter(flat[begin : begin + bucket.shard_size])
        shard = complete_on_host(bucket, self._runtime)[begin : begin + bucket.shard_size].clone()
        return nn.Parameter(self._runtime.place(shard))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    def gradients(
        self,
        mesh: Mesh,
        *,
        accumulation: int,
        reduce_dtype: torch.dtype | None = torch.float32,
        on_arrival: bool = False,
    ) -> GradientReducer:
        """Makes the reducer of the gradients that `set_gradients` takes. `reduce_dtype`: in which they are sent; None:
        the parameters' own."""
        return sharded_gradients(
            self.buckets, mesh, accumulation=accumulation, reduce_dtype=reduce_dtype, on_arrival=on_arrival
        )

    def set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Sets the gradient (fp32), or None, of each bucket's shard."""
        for shard, gradient in zip(self._shards, gradients, strict=True):
            shard.grad = gradient

    @torch.no_grad()
    def step(self) -> None:
        """Updates this rank's shards, and distributes the new values to all ranks, which with `arrivals.defer` may
        arrive after this has returned. What the script has written to parameters since the last step is kept.

        Raises:
            UsageError: A parameter has been frozen since: its part of the shards would be updated all the same.
        """
        self._check_none_is_frozen()
        self.arrivals.settle()
        for number in range(len(self.buckets)):
            self._follow_written(number)
        self.inner.step()
        if self._runtime.lazy:
            self._publish_in_graph()
        else:
            self._publish()

    def _check_none_is_frozen(self) -> None:
        members = (member for bucket in self.buckets for member in bucket.members)
        frozen = next((member.name for member in members if not member.parameter.requires_grad), None)
        if frozen is not None:
            raise UsageError(
                f"zero_1: {frozen} was frozen (requires_grad) after the optimizer was made, which updates its momentum "
                "and weight decay in one piece with other parameters; freeze parameters before that"
            )

    def _follow_written(self, number: int) -> None:
        """A shard that has memory of its own gets the values of parameters that the script has written."""
        bucket, flat, shard = self.buckets[number], self._flat[number], self._shards[number]
        if flat is not None:
            _attach(bucket, flat)
            if flat.dtype != shard.dtype:
                follow(shard, self._axis.own_shard(flat))
        elif self._written[number].found():
            values = complete_on_host(bucket, self._runtime)[bucket.begin : bucket.begin + bucket.shard_size]
            (own,) = self._runtime.to_host([shard])
            self._runtime.write(shard, follow(own, values.to(bucket.dtype)))

    def _publish_in_graph(self) -> None:
        """All-gathers the shards on a lazy device."""
        sent = [shard.detach().to(bucket.dtype) for bucket, shard in zip(self.buckets, self._shards, strict=True)]
        for number, flat in enumerate(self._axis.all_gather(sent)):
            for member in self.buckets[number].members:
                member.read_from(flat)
            self._written[number].forget()

    def _publish(self) -> None:
        """All-gathers the shards in place, in the flat tensors of which the parameters are views. All of them are on
        their way at once, the first layer's first."""
        complete = [flat for flat in self._flat if flat is not None]
        for flat, shard in zip(complete, self._shards, strict=True):
            if flat.dtype != shard.dtype:
                self._axis.own_shard(flat).copy_(shard)
        started = {number: start_gather_in_place(self._axis, flat) for number, flat in enumerate(complete)}
        self.arrivals.start({number: partial(self._arrived, number, wait) for number, wait in started.items()})

    def _arrived(self, number: int, wait: Callable[[], Tensor]) -> None:
        flat = wait()
        for member in self.buckets[number].members:
            if not member.in_order:
                member.read_from(flat)

    def ensure_state(self) -> None:
        """Creates the state that the first step would create, so that it can be restored in place.

        Its values are meaningless: call it only when they are about to be replaced.
        """
        if all(shard in self.inner.state for shard in self._shards):
            return
        saved = [shard.detach().clone() for shard in self._shards]
        take_empty_step(self.inner, self._shards, self._runtime)
        with torch.no_grad():
            for shard, value in zip(self._shards, saved, strict=True):
                shard.copy_(value)
        self._runtime.step_boundary()

    # What is saved

    def named_state(self) -> dict[str, dict[str, Any]]:
        """Parameter name to state: this rank's slices of the live tensors, values that apply to the complete parameter,
        and `master` where there are master weights."""
        states: dict[str, dict[str, Any]] = {name: {} for name in self.names}
        for bucket, shard in zip(self.buckets, self._shards, strict=True):
            held = dict(self.inner.state.get(shard, {}))
            if bucket.dtype != torch.float32:
                held[MASTER] = shard
            layouts = list(bucket.local_layouts())
            for key, value in held.items():
                if isinstance(value, Tensor) and value.shape == shard.shape and value.dim() == 1:
                    for member, layout in layouts:
                        states[member.name][key] = Shard(value, layout)
                else:
                    for member in bucket.members:
                        states[member.name][key] = value
        return states

    def named_groups(self) -> list[dict[str, Any]]:
        """The groups' plain hyperparameters, with parameter names instead of tensors."""
        return [
            {key: self._names_in(index) if key == "params" else plain(value) for key, value in group.items()}
            for index, group in enumerate(self.param_groups)
        ]

    def _names_in(self, group: int) -> list[str]:
        return [member.name for bucket in self.buckets if bucket.group == group for member in bucket.members]

    def load_named_groups(self, groups: list[dict[str, Any]], *, complete: bool = False) -> None:
        """Restores the learning rates, or with `complete` all values of the groups, and refreshes the shards from the
        parameters' restored values."""
        load = load_hyperparameters if complete else load_learning_rates
        load(self.inner, groups, self._runtime)
        self._refresh_shards()

    def load_named_values(self, name: str, values: Mapping[str, Any]) -> None:
        """Restores what the state of a parameter has besides tensors, which is that of the shards with a part of it."""
        for bucket, shard in zip(self.buckets, self._shards, strict=True):
            if any(member.name == name for member in bucket.members):
                load_plain_values(self.inner.state[shard], values)

    # What this rank alone holds

    def local_state(self) -> dict[str, Any]:
        """The state of this rank's shards, by bucket, in the form of `torch.optim`'s state dicts. It fits this rank of
        this mesh only; "zero_1" names both. Tensors are references."""
        states: list[dict[str, Any]] = [dict(self.inner.state.get(shard, {})) for shard in self._shards]
        for bucket, shard, state in zip(self.buckets, self._shards, states, strict=True):
            if bucket.dtype != torch.float32:
                state[MASTER] = shard.detach()
        groups = [{key: plain(value) for key, value in group.items()} for group in self.param_groups]
        for index, group in enumerate(groups):
            group["params"] = [number for number, bucket in enumerate(self.buckets) if bucket.group == index]
        return {"state": dict(enumerate(states)), "param_groups": groups, "zero_1": self._position()}

    def _position(self) -> dict[str, Any]:
        names = [[member.name for member in bucket.members] for bucket in self.buckets]
        mesh = {"mesh": self._mesh.shape, "rank": self._mesh.context.world.rank}
        return {**mesh, "buckets": names, "shard_sizes": [bucket.shard_size for bucket in self.buckets]}

    def load_local_state(self, saved: Mapping[str, Any]) -> None:
        """Restores in place what `local_state` returned.

        Raises:
            UsageError: It belongs to another rank, another mesh, or other parameters.
        """
        self._check_position(saved.get("zero_1"))
        groups = saved["param_groups"]
        for group, other in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in other.items() if key not in ("params", "lr")})
        self.load_named_groups(groups)
        if any(state.keys() - {MASTER} for state in saved["state"].values()):
            self.ensure_state()
        for number, shard in enumerate(self._shards):
            held: dict[str, Any] = {MASTER: shard, **self.inner.state.get(shard, {})}
            for key, value in saved["state"][number].items():
                self._restore_value(held[key], value, shard, key)

    def _check_position(self, found: Any) -> None:
        own = self._position()
        if found == own:
            return
        if not isinstance(found, Mapping):
            raise UsageError("state_dict: not made by ZeroRedundancyOptimizer; pass what its state_dict returned")
        differing = next(key for key in own if found.get(key) != own[key])
        raise UsageError(
            f"state_dict: its {differing} is {found.get(differing)}, and here it is {own[differing]}; a state dict is "
            "one rank's shard; save and restore with stepmark.Checkpointer, which fits any mesh"
        )

    @torch.no_grad()
    def _restore_value(self, held: Any, value: Any, shard: nn.Parameter, key: str) -> None:
        """Sets one value of a shard's state; tensors stay the same objects, on their devices."""
        if not isinstance(held, Tensor):
            self.inner.state[shard][key] = value
        elif held.device.type == "cpu":
            held.copy_(value)
        else:
            self._runtime.write(held, value.to("cpu"))

    def _refresh_shards(self) -> None:
        """Copies fp32 parameters to their shards, which are separate tensors on a lazy device."""
        for bucket, flat, shard in zip(self.buckets, self._flat, self._shards, strict=True):
            if flat is None and bucket.dtype == torch.float32:
                begin = self._axis.rank * bucket.shard_size
                values = complete_on_host(bucket, self._runtime)
                self._runtime.write(shard, values[begin : begin + bucket.shard_size].clone())

    def state_bytes(self) -> int:
        """Bytes of optimizer state that this rank holds, master weights included."""
        tensors = [value for shard in self._shards for value in self.inner.state.get(shard, {}).values()]
        masters = [p for b, p in zip(self.buckets, self._shards, strict=True) if b.dtype != torch.float32]
        return sum(value.nbytes for value in (*tensors, *masters) if isinstance(value, Tensor))


def _check_memory(names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
    """Raises UsageError where two parameters have the same memory, which the buckets would part."""
    seen: dict[Any, str] = {}
    for name, parameter in zip(names, parameters, strict=True):
        if parameter.numel():
            first = seen.setdefault((parameter.untyped_storage()._cdata, parameter.storage_offset()), name)
            if first != name:
                raise UsageError(
                    f"zero_1: {first} and {name} are two parameters in the same memory, which it would part; tie them "
                    "as one parameter (head.weight = table.weight)"
                )


def _attach(bucket: Bucket, flat: Tensor) -> None:
    """Makes the parameters views of the bucket's flat tensor again where the script has given one other memory, such as
    by `parameter.data = …`."""
    memory = flat.untyped_storage()._cdata
    for member in bucket.members:
        if not member.in_order:
            member.write_to(flat)  # it always has memory of its own
        elif member.parameter.untyped_storage()._cdata != memory or not _is_place(member.parameter, flat, member.begin):
            (place,) = member.places_in(flat)
            place.copy_(member.parameter.detach().clone())  # it may be another view of the same memory
            member.parameter.data = place


def _is_place(tensor: Tensor, flat: Tensor, begin: int) -> bool:
    return tensor.storage_offset() == flat.storage_offset() + begin and tensor.is_contiguous()
