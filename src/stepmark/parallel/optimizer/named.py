"""A `torch.optim` optimizer whose state is keyed by parameter names, whichever slices of parameters a rank updates.

It updates tensors, each of which holds named slices of parameters (`OptimizerTensor`). `OptimizerSharding` says which
ones: all parameters (`Replicated`), this rank's shard of each (`LocalShards`), its flat shards of buckets
(`FlatShards`), or some of the parameters, each of them whole (`WholeParameters`). The last two are ZeRO-1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stepmark.checkpoint.format.manifest import MASTER
from stepmark.errors import UsageError
from stepmark.parallel.buckets import make_buckets
from stepmark.parallel.gradients.accumulators import BucketAccumulator, ParameterAccumulator
from stepmark.parallel.gradients.exchange import AllReduce
from stepmark.parallel.gradients.reduced import Used
from stepmark.parallel.gradients.reducer import GradientReducer
from stepmark.parallel.optimizer.pending_gathers import PendingGathers
from stepmark.runtime.base import Runtime
from stepmark.runtime.collectives import GroupCollectives
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.layout import Layout, Shard

NUMBERS = (int, float, bool)
Groups = Sequence[Mapping[str, Any]]  # as for `torch.optim`, but "params" is a list of (name, parameter)
Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]  # from groups with the tensors to update


@dataclass(frozen=True)
class OptimizerTensor:
    """A tensor that the optimizer updates on this rank. `members`: the parameters of which it has elements, or which on
    a lazy device are in the same bucket: the name, and which slices of the global tensor are where in `tensor`; None:
    all of an unsharded parameter."""

    tensor: nn.Parameter  # a parameter, or float32 elements of one, on a lazy device of several
    group: int  # the number of its optimizer group
    members: tuple[tuple[str, Layout | None], ...]
    master: bool  # whether it is a float32 copy of parameters of another dtype, or a shard of one
    key: str | int  # what it is called in this rank's own state

    def named(self, value: Any) -> Iterator[tuple[str, Any]]:
        """A value of its state, by parameter name; slices carry their layout. Raises UsageError where tensors are in a
        container, and those of ranks would be different parts."""
        inside = [] if isinstance(value, Tensor) else [each for each in tree_leaves(value) if isinstance(each, Tensor)]
        for name, layout in self.members:
            if layout is not None and any(each.numel() > 1 for each in inside):
                raise UsageError(
                    f"optimizer: its state of {name} has tensors inside a {type(value).__name__}, of which each rank "
                    "has a part; give each a key of its own in state[parameter]"
                )
            if not isinstance(value, Tensor) or layout is None:
                yield name, value
            elif value.shape == self.tensor.shape:
                if layout.parts:
                    yield name, Shard(value, layout)
            elif layout == Layout.full(layout.shape):
                yield name, Shard(value, Layout.full(tuple(value.shape)))
            else:
                yield name, value


class OptimizerSharding:
    """Which tensors this rank updates, and how ranks share gradients and new values.

    Args:
        order: The names in the model's order, which `parameters` follows, so that sums over all gradients do not depend
            on the groups; None: that of the groups.
        bucket_elements: How many gradients are sent at a time; None: by the device.
    """

    held: list[OptimizerTensor]  # what this rank updates, in the groups' order
    divided_by: str | None = None  # the field by which ranks update different elements, `zero_1` or `fsdp`
    separate = True  # whether each of `held` has one parameter, so that states come and go with parameters

    def __init__(
        self, groups: Groups, *, order: Sequence[str] | None = None, bucket_elements: int | None = None
    ) -> None:
        parameters = {name: parameter for group in groups for name, parameter in group["params"]}
        self.groups = [[name for name, _ in group["params"]] for group in groups]
        self.names = [name for name in order or parameters if name in parameters]
        self.parameters: list[nn.Parameter] = [parameters[name] for name in self.names]
        self.gathers = PendingGathers()  # what `publish` has left to wait for
        # Whether torch may use its fused kernels: a host's round the last elements of a tensor in another way, so that
        # an update would depend on how parameters are cut.
        self.fuses = True
        self.place: dict[str, Any] = {}  # what this rank's own state fits, in plain values
        self.masked: list[tuple[OptimizerTensor, Tensor]] = []  # what the next update leaves as it is where a mask is 0
        self._bucket_elements = bucket_elements

    def gradients(
        self, mesh: Mesh, *, accumulation: int, reduce_dtype: torch.dtype | None, on_arrival: bool
    ) -> GradientReducer:
        """Makes the reducer whose gradients `assigned` takes, here of complete means: the same kind on all ranks, also
        on those of a pipeline stage that has no parameter to train. `accumulation` is the number of micro-batches in a
        step, `reduce_dtype` the type in which data parallel ranks of an eager device send each other gradients; None:
        the parameters', with ZeRO-1 by elements. `on_arrival`: add each gradient to the sums as soon as autograd has
        made it, as flat buckets do in any case."""
        assert reduce_dtype is not None
        elements = self._bucket_elements
        exchange = AllReduce(self.parameters, mesh, reduce_dtype=reduce_dtype, bucket_elements=elements)
        if isinstance(mesh.data_parallel, GroupCollectives) or mesh.ranks.fixed:
            named = list(zip(self.names, self.parameters, strict=True))
            buckets = make_buckets([named], mesh, elements, reordered=False)
            flat = BucketAccumulator(buckets, mesh.runtime, mesh.ranks, sent=lambda _: reduce_dtype)
            return GradientReducer(flat, exchange, mesh)
        sums = ParameterAccumulator(self.parameters, mesh.runtime, accumulation=accumulation, on_arrival=on_arrival)
        return GradientReducer(sums, exchange, mesh)

    def assigned(self, gradients: Sequence[Tensor | None], used: Used | None) -> list[Tensor | None]:
        """The gradient of each of `held`. Where it is not known on the host, or only some of its parameters have one,
        `masked` has the tensor afterwards. Collective unless all are None."""
        named = dict(zip(self.names, gradients, strict=True))
        return [named[str(held.key)] for held in self.held]

    def follow(self) -> None:
        """Takes over what a script has written to parameters since the last update."""

    def publish(self) -> None:
        """Gives all ranks their new values."""


class NamedOptimizer:
    """The optimizer of a training step.

    Args:
        groups: The hyperparameters of each group; "params" is ignored.
        make: Makes the optimizer from groups with this rank's tensors; some may be empty.
        given: Whether the user has made the optimizer, or chosen its class: then its groups are restored completely,
            and those of one that training arguments describe keep the arguments' values.

    Attributes:
        inner: What computes the update. Learning rate schedules and callbacks work on its parameter groups.
        held_names: The names of the tensors that a user's optimizer updates, by identity: its state is saved as a
            `torch.optim` one's, and made by reading it. None where it has to be made first, or groups keep what
            arguments say.
    """

    def __init__(
        self, distribution: OptimizerSharding, groups: Groups, make: Make, runtime: Runtime, *, given: bool = False
    ) -> None:
        self.distribution = distribution
        self.names, self.parameters = distribution.names, distribution.parameters
        self.gathers = distribution.gathers
        self.gradients = distribution.gradients  # makes the reducer whose gradients `set_gradients` takes
        self.given = given
        self._runtime = runtime
        self._held = distribution.held
        tensors = [[held.tensor for held in self._held if held.group == number] for number in range(len(groups))]
        self.inner = make([{**group, "params": own} for group, own in zip(groups, tensors, strict=True)])
        if not {id(held.tensor) for held in self._held} <= {id(each) for each in self.parameters}:
            vars(self.inner)["zero_grad"] = self._zero_grad  # a callback means the gradients that it sees
        for each in () if distribution.fuses else self.param_groups:
            each |= {"fused": None} if each.get("fused") else {}
        self._made_with = plain_attributes(self.inner, NUMBERS)
        self._made_groups = self._hyperparameters()
        self.divided_by = distribution.divided_by  # may also be an axis of the mesh along which parameters differ
        whole = distribution.separate and distribution.divided_by != "zero_1"
        own = given and whole and not any(held.master for held in self._held)
        self.held_names = {id(held.tensor): str(held.key) for held in self._held} if own else None

    def _zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters:
            parameter.grad = None if set_to_none or parameter.grad is None else torch.zeros_like(parameter.grad)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @torch.no_grad()
    def set_gradients(self, gradients: Sequence[Tensor | None], used: Used | None = None) -> None:
        """Sets the reduced gradients, or clears them with None; for both see `ReducedGradients`. Separate from `step`,
        so that callbacks can read them before the update. Collective where tensor parallelism has sharded whole
        parameters. In memory, the elements of a gradient are in the order of the parameter's: fused kernels go through
        both at once."""
        for held, gradient in zip(self._held, self.distribution.assigned(gradients, used), strict=True):
            like = held.tensor
            if gradient is not None and (gradient.dtype, gradient.stride()) != (like.dtype, like.stride()):
                gradient = torch.empty_like(like).copy_(gradient)
            like.grad = gradient

    @torch.no_grad()
    def step(self) -> None:
        """Updates the parameters on all ranks. Collective. With `gathers.defer`, new values may arrive later. What the
        script has written to parameters since the last step is kept. A parameter without a gradient keeps its value and
        its state. Raises UsageError where a parameter was added to the optimizer."""
        self.check_groups()
        self.gathers.wait()
        self.distribution.follow()
        with self._unchanged_where_masked():
            self.inner.step()
        self.distribution.publish()

    def check_groups(self) -> None:
        if sum(len(group["params"]) for group in self.param_groups) != len(self._held):
            raise UsageError(
                "optimizer: a parameter was added to its groups, or taken out, after training began; it would be in no "
                "checkpoint, and its gradients those of one rank: do so in create_optimizer, and switch requires_grad "
                "to train it later"
            )

    @contextmanager
    def _unchanged_where_masked(self) -> Iterator[None]:
        """Around the update. A state that it makes begins at 0. A mask of one element is that of a whole state, and is
        waited for only where a part of it is on the host; one of all elements leaves counts of steps alone."""
        masked, self.distribution.masked = self.distribution.masked, []
        before = [{key: value.clone() for key, value in self._tensors_of(held).items()} for held, _ in masked]
        yield
        for (held, mask), old in zip(masked, before, strict=True):
            for key, value in self._tensors_of(held).items():
                if mask.dim() == 0 or value.shape == mask.shape:
                    kept = old.get(key, torch.zeros_like(value))
                    value.copy_(torch.where(mask.to(value.device), value, kept))

    def _tensors_of(self, held: OptimizerTensor) -> dict[str, Tensor]:
        state = {key: each for key, each in self.inner.state.get(held.tensor, {}).items() if isinstance(each, Tensor)}
        return {**state, "": held.tensor}

    @torch.no_grad()
    def switch(self, mode: str) -> None:
        """Puts an optimizer that has modes, as schedule-free ones do, into `train` or `eval`. Collective."""
        method = getattr(self.inner, mode, None)
        if callable(method):
            self.gathers.wait()
            self.distribution.follow()
            method()
            self.distribution.publish()

    def ensure_state(self) -> None:
        """Creates the state that the first step would create, so that it can be restored in place. Its values are
        meaningless: call it only when they are about to be replaced. Existing states and gradients are kept."""
        missing = [held.tensor for held in self._held if held.tensor not in self.inner.state]
        if not missing or self.held_names is not None:
            return
        gradients = [held.tensor.grad for held in self._held]
        for held in self._held:
            held.tensor.grad = None
        saved = self._runtime.to_host(missing)
        initialize_state(self.inner, missing, self._runtime)
        for tensor, value in zip(missing, saved, strict=True):
            self._runtime.write(tensor, value)
        for held, gradient in zip(self._held, gradients, strict=True):
            held.tensor.grad = gradient

    def changed_numbers(self) -> dict[str, Any]:
        """Attributes of the optimizer that have changed since it was made, such as a count that state_dict() lacks."""
        now, made = plain_attributes(self.inner, NUMBERS), self._made_with
        return {key: value for key, value in now.items() if value != made.get(key, value)}

    def changed_groups(self) -> list[dict[str, Any]]:
        """The hyperparameters of each group, but for learning rates, that are not what arguments say. Empty where a
        user has made the optimizer, whose groups are saved and restored completely."""
        pairs = zip(self._hyperparameters(), self._made_groups, strict=True)
        return [{key: now[key] for key in now if key not in made or now[key] != made[key]} for now, made in pairs]

    def load_changed_groups(self, changed: Sequence[Mapping[str, Any]]) -> None:
        """Makes these changes, by group, to what arguments say, and no others."""
        for group, made, saved in zip(self.param_groups, self._made_groups, changed, strict=False):
            for key, value in {**made, **saved}.items():
                if to_python(group.get(key)) != value:
                    self._write(group, key, value)

    def _hyperparameters(self) -> list[dict[str, Any]]:
        left_out = OWN | {"lr", "initial_lr"}
        groups = () if self.given else self.param_groups
        return [{key: to_python(group[key]) for key in group if key not in left_out} for group in groups]

    def forget_state(self, names: Sequence[str]) -> bool:
        """Removes the state of these parameters, as before their first gradient. Returns False, and removes nothing,
        where the optimizer needs its state from the start (lazy devices), or a state is that of several parameters."""
        if self._runtime.lazy or not self.distribution.separate:
            return False
        for held in self._having(names):
            self.inner.state.pop(held.tensor, None)
        return True

    def _having(self, names: Sequence[str]) -> list[OptimizerTensor]:
        wanted = set(names)
        return [held for held in self._held if any(name in wanted for name, _ in held.members)]

    # What is saved

    def _state_of(self, held: OptimizerTensor) -> dict[str, Any]:
        """The live state of a tensor, and `master` where it is master weights."""
        return {**self.inner.state.get(held.tensor, {}), **({MASTER: held.tensor} if held.master else {})}

    def named_state(self) -> dict[str, dict[str, Any]]:
        """Parameter name to state: what this rank holds of the live tensors, values that apply to the complete
        parameter, and `master` where there are master weights."""
        states: dict[str, dict[str, Any]] = {name: {} for held in self._held for name, _ in held.members}
        for held in self._held:
            for key, value in self._state_of(held).items():
                for name, named in held.named(value):
                    states[name][key] = named
        return states

    def named_groups(self) -> list[dict[str, Any]]:
        """The groups' plain hyperparameters, with names in place of parameters. Raises UsageError as `step`."""
        self.check_groups()
        return [
            {key: list(names) if key == "params" else to_python(value) for key, value in group.items()}
            for group, names in zip(self.param_groups, self.distribution.groups, strict=True)
        ]

    def load_named_groups(self, groups: list[dict[str, Any]]) -> None:
        """Restores the saved learning rates, without which a schedule would start over; of an optimizer that was given
        all values, as `load_state_dict` does: schedule-free ones keep counts and sums there."""
        for group, saved in zip(self.param_groups, groups, strict=True):
            for key in list(saved) if self.given else ["lr"]:  # all others of a resumed run come from its own arguments
                self._write(group, key, saved[key])

    def _write(self, group: dict[str, Any], key: str, value: Any) -> None:
        live = group.get(key)
        if isinstance(live, Tensor):
            self._runtime.write(live, torch.tensor(value, dtype=live.dtype).reshape(live.shape))
        elif key not in OWN:
            group[key] = value

    def load_named_values(self, name: str, values: Mapping[str, Any]) -> None:
        """Restores what the state of a parameter has besides tensors, such as a count of steps."""
        for held in self._having([name]):
            load_plain_values(self.inner.state[held.tensor], values)

    # What this rank alone holds

    def local_state(self) -> dict[str, Any]:
        """The state of this rank's tensors, in the form of `torch.optim`'s state dicts. It fits this rank of this mesh
        only; "zero_1" names both. Tensors are references."""
        states = {
            held.key: {k: v.detach() if isinstance(v, Tensor) else v for k, v in self._state_of(held).items()}
            for held in self._held
        }
        groups = [{key: to_python(value) for key, value in group.items()} for group in self.param_groups]
        for number, group in enumerate(groups):
            group["params"] = [held.key for held in self._held if held.group == number]
        return {"state": states, "param_groups": groups, "zero_1": self.distribution.place}

    @torch.no_grad()
    def load_local_state(self, saved: Mapping[str, Any]) -> None:
        """Restores in place what `local_state` returned. Raises UsageError where that belongs to another rank, another
        mesh, or other parameters."""
        self._check_place(saved.get("zero_1"))
        self.load_named_groups(saved["param_groups"])
        if any(state.keys() - {MASTER} for state in saved["state"].values()):
            self.ensure_state()
        for held in self._held:
            state = saved["state"][held.key]
            if not state.keys() - {MASTER} and self.distribution.separate:
                self.inner.state.pop(held.tensor, None)
            live = self._state_of(held)
            for key, value in state.items():
                self._restore(live.get(key), value, held.tensor, key)

    def _check_place(self, found: Any) -> None:
        own = self.distribution.place
        if found == own:
            return
        if not isinstance(found, Mapping):
            raise UsageError("state_dict: not made by ZeroRedundancyOptimizer; pass what its state_dict returned")
        differing = next((key for key in own if found.get(key) != own[key]), "zero_1")
        raise UsageError(
            f"state_dict: its {differing} is {found.get(differing)}, and here it is {own.get(differing)}; a state dict "
            "is one rank's shard; save and restore with stepmark.Checkpointer, which fits any mesh"
        )

    def _restore(self, live: Any, value: Any, tensor: Tensor, key: str) -> None:
        """Sets one value of a state; tensors stay the same objects, on their devices."""
        if not isinstance(live, Tensor) or not isinstance(value, Tensor):
            load_plain_values(self.inner.state[tensor], {key: value})
        elif live.device.type == "cpu":
            live.copy_(value)
        else:
            self._runtime.write(live, value.to("cpu"))

    def state_bytes(self) -> int:
        """Bytes of optimizer state that this rank holds, master weights included."""
        values = [value for held in self._held for value in self._state_of(held).values()]
        return sum(value.nbytes for value in values if isinstance(value, Tensor))


# What a group keeps when it is restored: how the optimizer computes, a matter of its device, and its parameters.
OWN = frozenset({"params", "param_names", "foreach", "fused", "capturable"})


def initialize_state(inner: torch.optim.Optimizer, tensors: Sequence[Tensor], runtime: Runtime) -> None:
    """Takes one step with zero gradients and learning rate 0, in which any optimizer creates its state. What it keeps
    in its groups and attributes, such as a count of steps, is as before. Restore the tensors afterwards: weight decay
    and the like may have changed them."""
    kept = [{key: _copied(key, group[key]) for key in group if key != "params"} for group in inner.param_groups]
    own = plain_attributes(inner, (*NUMBERS, str, list, dict))
    for group in inner.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    for tensor in tensors:
        tensor.grad = torch.zeros_like(tensor)
    inner.step()
    for tensor in tensors:
        tensor.grad = None
    for group, values in zip(inner.param_groups, kept, strict=True):
        for key, value in values.items():
            if key != "lr" and isinstance(value, Tensor):
                group[key].copy_(value)
            else:
                group[key] = value
    vars(inner).update(own)
    runtime.step_boundary()


def plain_attributes(inner: torch.optim.Optimizer, kinds: Sequence[type]) -> dict[str, Any]:
    """Copies of what an optimizer keeps beside its state and groups, of these types."""
    return {k: copy(v) for k, v in vars(inner).items() if type(v) in kinds and k not in ("state", "param_groups")}


def _copied(key: str, value: Any) -> Any:
    """A group's value that a step cannot change; the learning rate is not there in the empty step."""
    if key == "lr":
        return value
    return value.clone() if isinstance(value, Tensor) else copy(value)


def load_plain_values(state: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Gives a parameter's state the saved values that are no tensors. A None does not replace a tensor, which begins at
    zero where the optimizer needs it from the start."""
    for key, value in saved.items():
        if value is not None or not isinstance(state.get(key), Tensor):
            state[key] = value


def to_python(value: Any) -> Any:
    """A hyperparameter as a plain value: a 0-dim tensor becomes a number."""
    return value.item() if isinstance(value, Tensor) and value.dim() == 0 else value
