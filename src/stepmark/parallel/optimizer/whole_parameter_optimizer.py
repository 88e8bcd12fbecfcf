"""Whole parameters for optimizers that use a parameter's norm, its rows and columns, or blocks of it.

With ZeRO-1 every data parallel rank updates some of the parameters, and holds the state and the fp32 master weights of
these alone. A parameter that tensor parallelism has sharded belongs to one of the tensor parallel ranks, which holds
all of it. Phases of a step: gradients are averaged over the ranks as in plain data parallelism; the shards of each are
brought together (`GatheredParameters`); each rank updates its own parameters; the shards of their new values go back,
and with ZeRO-1 new values are all-gathered, in rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.checkpoint.format.rows import MASTER
from stepmark.errors import UsageError
from stepmark.parallel.gradients.reducer import GradientReducer, mean_gradients
from stepmark.parallel.optimizer.elementwise import sharding_unit
from stepmark.parallel.optimizer.gathered_parameters import GatheredParameters
from stepmark.parallel.optimizer.parameter_division import ROUND_ELEMENTS, Round, divide, make_rounds
from stepmark.parallel.optimizer.parameter_optimizer import ParameterOptimizer
from stepmark.parallel.optimizer.wrapped import load_hyperparameters, load_learning_rates, plain
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.layout import Layout, Shard, layout_of


class WholeParameterOptimizer:
    """A `torch.optim` optimizer over this rank's parameters, with state keyed by parameter name. See `StepOptimizer`.

    Attributes:
        names: Of all parameters, in the model's order.
        parameters: All parameters, in the same order.
        inner: The optimizer; its groups have this rank's parameters, or their master weights.
        given: Whether the user has made the optimizer; see `ParameterOptimizer`.
    """

    given = False

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        mesh: Mesh,
        *,
        order: Sequence[str] | None = None,
        zero_1: bool = True,
        elementwise_group: Callable[[Mapping[str, Any]], bool] = lambda group: False,
        master_weights: bool = True,
        bucket_elements: int | None = None,
    ) -> None:
        """`groups`: as for `torch.optim`, but "params" is a list of (name, parameter). `make` creates the optimizer
        from groups with this rank's tensors; some may be empty. `order`: the names in the model's order; None: that of
        the groups. `zero_1`: divide the parameters over the data parallel ranks. `elementwise_group`: whether the
        optimizer updates a group's parameters element by element, so that shards of them will do. `master_weights`: as
        in `ParameterOptimizer`. `bucket_elements`: what a rank sends at most at a time; None: the default. Collective.

        Raises:
            UsageError: The device is lazy, or the optimizer needs all parameters at once.
        """
        self._mesh = mesh
        self._bucket_elements = bucket_elements
        self._runtime = mesh.runtime
        self._axis = mesh.data_parallel
        self._zero_1, self._master_weights = zero_1, master_weights
        self._members = [[name for name, _ in group["params"]] for group in groups]
        parameters = {name: parameter for group in groups for name, parameter in group["params"]}
        self.names = [name for name in order or parameters if name in parameters]
        self.parameters = [parameters[name] for name in self.names]
        owners = self._divide()
        self._own = [index for index, owner in enumerate(owners) if owner == self._axis.rank]
        self._gathered_names = self._names_to_gather(groups, elementwise_group)
        self._gathered = self._gather()
        self._optimizer = ParameterOptimizer(
            [{**group, "params": self._held(group["params"])} for group in groups],
            make,
            self._runtime,
            order=self.names,
            master_weights=master_weights,
        )
        self.inner = self._optimizer.inner
        self.arrivals = self._optimizer.arrivals
        self._check()
        limit = bucket_elements or ROUND_ELEMENTS
        divided = zero_1 and self._axis.size > 1
        self._rounds = make_rounds(self.parameters, owners, self._axis.size, limit) if divided else []

    @classmethod
    def around(
        cls,
        optimizer: torch.optim.Optimizer,
        names: Mapping[nn.Parameter, str],
        mesh: Mesh,
        *,
        bucket_elements: int | None = None,
    ) -> WholeParameterOptimizer:
        """Gives an optimizer that the user created over the model's parameters the complete ones in place of shards.
        `names` are the model's. Collective.

        Raises:
            UsageError: The optimizer needs all parameters at once, or has state of a parameter already.
        """
        sharding_unit(type(optimizer), "tensor_parallel_size")
        sharded = [(name, each) for each, name in names.items() if layout_of(each) is not None]
        stateful = next((name for name, each in sharded if optimizer.state.get(each)), None)
        if stateful is not None:
            raise UsageError(
                f"optimizers: {type(optimizer).__name__} has a state of {stateful} already, and tensor parallelism "
                "shards that; pass an optimizer that has not taken a step"
            )

        def exchange(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
            for own, group in zip(optimizer.param_groups, groups, strict=True):
                own["params"] = group["params"]
            return optimizer

        named = [{**g, "params": [(names[each], each) for each in g["params"]]} for g in optimizer.param_groups]
        order = list(names.values())
        made = cls(
            named, exchange, mesh, order=order, zero_1=False, master_weights=False, bucket_elements=bucket_elements
        )
        made.given = True
        return made

    def _divide(self) -> list[int]:
        """The data parallel rank of each parameter: this one of all of them without ZeRO-1."""
        if not self._zero_1:
            return [self._axis.rank for _ in self.parameters]
        return divide([parameter.numel() for parameter in self.parameters], self._axis.size)

    def _names_to_gather(
        self, groups: Sequence[Mapping[str, Any]], elementwise_group: Callable[[Mapping[str, Any]], bool]
    ) -> list[str]:
        """Of the parameters that belong to this data parallel rank, those of which tensor parallelism has left it a
        shard that will not do."""
        elementwise = {name for group in groups if elementwise_group(group) for name, _ in group["params"]}
        sharded = [self.names[index] for index in self._own if layout_of(self.parameters[index]) is not None]
        return [name for name in sharded if name not in elementwise]

    def _gather(self) -> GatheredParameters | None:
        if self._runtime.lazy or self._mesh.tensor_parallel.size == 1:
            return None
        parameters = dict(zip(self.names, self.parameters, strict=True))
        chosen = [parameters[name] for name in self._gathered_names]
        return GatheredParameters(
            chosen, self._mesh, master_weights=self._master_weights, round_elements=self._bucket_elements
        )

    def _complete(self) -> dict[str, nn.Parameter]:
        """The complete tensors that this rank updates, by name."""
        found = self._gathered.complete if self._gathered is not None else {}
        return {self._gathered_names[index]: tensor for index, tensor in found.items()}

    def _held(self, named: Sequence[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
        """Of the parameters of a group, what this rank updates."""
        own, complete = {self.names[index] for index in self._own}, self._complete()
        elsewhere = set(self._gathered_names) - complete.keys() if self._gathered is not None else set()
        return [(name, complete.get(name, each)) for name, each in named if name in own - elsewhere]

    def _check(self) -> None:
        kind = type(self.inner)
        sharding_unit(kind, "zero_1" if self._zero_1 else "tensor_parallel_size")
        if self._runtime.lazy:
            raise UsageError(
                f"zero_1: {kind.__name__} uses complete parameters, which each belong to one rank, and the ranks of "
                f"{self._runtime.name} run one graph; choose an elementwise optimizer, or switch zero_1 off"
            )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    def gradients(
        self, mesh: Mesh, *, accumulation: int, reduce_dtype: torch.dtype = torch.float32, on_arrival: bool = False
    ) -> GradientReducer:
        """Makes the reducer of the gradients that `set_gradients` takes: of all parameters."""
        named = list(zip(self.names, self.parameters, strict=True))
        return mean_gradients(
            named,
            mesh,
            accumulation=accumulation,
            reduce_dtype=reduce_dtype,
            bucket_elements=self._bucket_elements,
            on_arrival=on_arrival,
        )

    @torch.no_grad()
    def set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Sets the gradient, or None, of each of `parameters` that this rank updates. Collective where tensor
        parallelism has sharded parameters, unless all are None."""
        found = {self.names[index]: gradients[index] for index in self._own}
        if self._gathered is not None and any(gradient is not None for gradient in gradients):
            complete = self._gathered.gradients([found[name] for name in self._gathered_names])
            found.update({self._gathered_names[index]: gradient for index, gradient in complete.items()})
        self._optimizer.set_gradients([found[name] for name in self._optimizer.names])

    @torch.no_grad()
    def step(self) -> None:
        """Updates this rank's parameters, and distributes the new values to all ranks. Collective.

        Raises:
            UsageError: A parameter has been frozen since: its momentum and weight decay would go on.
        """
        pairs = zip(self.names, self.parameters, strict=True)
        frozen = next((name for name, parameter in pairs if not parameter.requires_grad), None)
        if frozen is not None and self._zero_1:
            raise UsageError(
                f"zero_1: {frozen} was frozen (requires_grad) after the optimizer was made; freeze parameters before "
                "that"
            )
        if self._gathered is not None:
            self._gathered.refresh()
        self._optimizer.step()
        if self._gathered is not None:
            self._gathered.publish()
        for each in self._rounds:
            self._publish(each)

    def _publish(self, each: Round) -> None:
        """All-gathers the parameters of a round."""
        own = [self.parameters[index].reshape(-1) for index in each.sent[self._axis.rank]]
        padding = each.length - sum(part.numel() for part in own)
        sent = torch.cat([*own, torch.zeros(padding, dtype=each.dtype, device=self._runtime.device)])
        (gathered,) = self._axis.all_gather([sent])
        for rank, values in enumerate(gathered.split(each.length)):
            if rank != self._axis.rank:
                received = [self.parameters[index] for index in each.sent[rank]]
                parts = values[: sum(p.numel() for p in received)].split([p.numel() for p in received])
                for parameter, part in zip(received, parts, strict=True):
                    parameter.copy_(part.view(parameter.shape))

    def ensure_state(self) -> None:
        """Creates the state that the first step would create, so that it can be restored in place."""
        self._optimizer.ensure_state()

    def forget_state(self, names: Sequence[str]) -> bool:
        """Removes the state of these parameters, as before their first gradient."""
        return self._optimizer.forget_state(names)

    # What is saved

    def named_state(self) -> dict[str, dict[str, Any]]:
        """Parameter name to state, of this rank's parameters."""
        gathered = self._complete()
        return {
            name: {key: _complete_shard(value) for key, value in state.items()} if name in gathered else state
            for name, state in self._states().items()
        }

    def _states(self) -> dict[str, dict[str, Any]]:
        """The same, with plain tensors, or those that carry a layout, as states."""
        states = self._optimizer.named_state()
        dtypes = {name: parameter.dtype for name, parameter in zip(self.names, self.parameters, strict=True)}
        for name, complete in self._complete().items():
            if complete.dtype != dtypes[name]:
                states[name][MASTER] = complete.detach()
        return states

    def named_groups(self) -> list[dict[str, Any]]:
        """The groups' plain hyperparameters, with the names of all their parameters."""
        return [
            {key: names if key == "params" else plain(value) for key, value in group.items()}
            for group, names in zip(self.param_groups, self._members, strict=True)
        ]

    def load_named_groups(self, groups: list[dict[str, Any]], *, complete: bool = False) -> None:
        """Restores the learning rates, or with `complete`, or where the user has made the optimizer, all values of the
        groups."""
        load = load_hyperparameters if complete or self.given else load_learning_rates
        load(self.inner, groups, self._runtime)

    def load_named_values(self, name: str, values: Mapping[str, Any]) -> None:
        """Restores what the state of a parameter has besides tensors."""
        self._optimizer.load_named_values(name, values)

    # What this rank alone holds

    def local_state(self) -> dict[str, Any]:
        """The state of this rank's parameters, by name. It fits this rank of this mesh only; "zero_1" names both.
        Tensors are references."""
        states = {name: {key: _plain(value) for key, value in s.items()} for name, s in self._states().items()}
        return {"state": states, "param_groups": self.named_groups(), "zero_1": self._position()}

    def _position(self) -> dict[str, Any]:
        own = self._optimizer.names
        return {"mesh": self._mesh.shape, "rank": self._mesh.context.world.rank, "parameters": own}

    @torch.no_grad()
    def load_local_state(self, saved: Mapping[str, Any]) -> None:
        """Restores what `local_state` returned.

        Raises:
            UsageError: It belongs to another rank, another mesh, or other parameters.
        """
        if saved.get("zero_1") != self._position():
            raise UsageError(
                f"state_dict: made for {saved.get('zero_1')}, and here it is {self._position()}; a state dict is one "
                "rank's part; save and restore with stepmark.Checkpointer, which fits any mesh"
            )
        self.load_named_groups(saved["param_groups"], complete=True)
        if any(state.keys() - {MASTER} for state in saved["state"].values()):
            self.ensure_state()
        self.forget_state([name for name, state in saved["state"].items() if not state.keys() - {MASTER}])
        live = self._states()
        for name, state in saved["state"].items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    _plain(live[name][key]).copy_(value)
            self.load_named_values(name, {k: value for k, value in state.items() if not isinstance(value, Tensor)})

    def state_bytes(self) -> int:
        """Bytes of optimizer state that this rank holds, master weights included."""
        values = [_plain(value) for state in self._states().values() for value in state.values()]
        return sum(value.nbytes for value in values if isinstance(value, Tensor))


def _complete_shard(value: Any) -> Any:
    """A state of a gathered parameter, which is complete; without a layout it would have that of this rank's shard."""
    return Shard(value, Layout.full(tuple(value.shape))) if isinstance(value, Tensor) else value


def _plain(value: Any) -> Any:
    """A state's tensor without its layout."""
    return value.tensor if isinstance(value, Shard) else value
