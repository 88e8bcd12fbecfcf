"""ZeRO-1 by whole parameters, for optimizers that use a parameter's norm, its rows and columns, or blocks of it.

Every data parallel rank updates some of the parameters, and holds the state and the fp32 master weights of these alone.
Phases of a step: gradients are averaged over the ranks as in plain data parallelism; each rank updates its own
parameters; their new values are all-gathered, in rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stepmark.checkpoint.format.rows import MASTER
from stepmark.errors import UsageError
from stepmark.optim.elementwise import sharding_unit
from stepmark.optim.protocols import GradientReducer
from stepmark.optim.wrapped import load_hyperparameters, load_learning_rates, plain
from stepmark.parallel.data_parallel import data_parallel_gradients
from stepmark.parallel.parameter_optimizer import ParameterOptimizer
from stepmark.parallel.zero.parameter_division import ROUND_ELEMENTS, Round, divide, make_rounds
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.layout import layout_of


class WholeParameterOptimizer:
    """A `torch.optim` optimizer over this rank's parameters, with state keyed by parameter name. See `StepOptimizer`.

    Attributes:
        names: Of all parameters, in the model's order.
        parameters: All parameters, in the same order.
        inner: The optimizer; its groups have this rank's parameters, or their master weights.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        mesh: Mesh,
        *,
        order: Sequence[str] | None = None,
        round_elements: int | None = None,
    ) -> None:
        """`groups`: as for `torch.optim`, but "params" is a list of (name, parameter). `make` creates the optimizer
        from groups with this rank's tensors; some may be empty. `order`: the names in the model's order; None: that of
        the groups. `round_elements`: what a rank sends at most at a time; None: the default.

        Raises:
            UsageError: The device is lazy, tensor parallelism has sharded a parameter, or the optimizer needs all
                parameters at once.
        """
        self._mesh = mesh
        self._runtime = mesh.runtime
        self._axis = mesh.data_parallel
        self._members = [[name for name, _ in group["params"]] for group in groups]
        parameters = {name: parameter for group in groups for name, parameter in group["params"]}
        self.names = [name for name in order or parameters if name in parameters]
        self.parameters = [parameters[name] for name in self.names]
        owners = divide([parameter.numel() for parameter in self.parameters], self._axis.size)
        self._own = [index for index, owner in enumerate(owners) if owner == self._axis.rank]
        own = {self.names[index] for index in self._own}
        own_groups = [{**group, "params": [pair for pair in group["params"] if pair[0] in own]} for group in groups]
        self._optimizer = ParameterOptimizer(own_groups, make, self._runtime, order=self.names)
        self.inner = self._optimizer.inner
        self._check()
        limit = round_elements or ROUND_ELEMENTS
        self._rounds = make_rounds(self.parameters, owners, self._axis.size, limit) if self._axis.size > 1 else []

    def _check(self) -> None:
        kind = type(self.inner)
        sharding_unit(kind)
        if self._runtime.lazy:
            raise UsageError(
                f"zero_1: {kind.__name__} uses complete parameters, which each belong to one rank, and the ranks of "
                f"{self._runtime.name} run one graph; choose an elementwise optimizer, or switch zero_1 off"
            )
        sharded = next((n for n, p in zip(self.names, self.parameters, strict=True) if layout_of(p) is not None), None)
        if sharded is not None:
            raise UsageError(
                f"zero_1: {kind.__name__} uses complete parameters, and tensor parallelism shards {sharded}; set "
                "tensor_parallel_size to 1, or choose an elementwise optimizer such as AdamW"
            )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    def gradients(self, mesh: Mesh, *, accumulation: int) -> GradientReducer:
        """Makes the reducer of the gradients that `set_gradients` takes: of all parameters."""
        named = list(zip(self.names, self.parameters, strict=True))
        return data_parallel_gradients(named, mesh, accumulation=accumulation)

    def set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Sets the gradient, or None, of each of `parameters` that this rank updates."""
        self._optimizer.set_gradients([gradients[index] for index in self._own])

    @torch.no_grad()
    def step(self) -> None:
        """Updates this rank's parameters, and distributes the new values to all ranks. Collective.

        Raises:
            UsageError: A parameter has been frozen since: its momentum and weight decay would go on.
        """
        pairs = zip(self.names, self.parameters, strict=True)
        frozen = next((name for name, parameter in pairs if not parameter.requires_grad), None)
        if frozen is not None:
            raise UsageError(
                f"zero_1: {frozen} was frozen (requires_grad) after the optimizer was made; freeze parameters before "
                "that"
            )
        self._optimizer.step()
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
        return self._optimizer.named_state()

    def named_groups(self) -> list[dict[str, Any]]:
        """The groups' plain hyperparameters, with the names of all their parameters."""
        return [
            {key: names if key == "params" else plain(value) for key, value in group.items()}
            for group, names in zip(self.param_groups, self._members, strict=True)
        ]

    def load_named_groups(self, groups: list[dict[str, Any]], *, complete: bool = False) -> None:
        """Restores the learning rates, or with `complete` all values of the groups."""
        load = load_hyperparameters if complete else load_learning_rates
        load(self.inner, groups, self._runtime)

    def load_named_values(self, name: str, values: Mapping[str, Any]) -> None:
        """Restores what the state of a parameter has besides tensors."""
        self._optimizer.load_named_values(name, values)

    # What this rank alone holds

    def local_state(self) -> dict[str, Any]:
        """The state of this rank's parameters, by name. It fits this rank of this mesh only; "zero_1" names both.
        Tensors are references."""
        states = self.named_state()
        return {"state": states, "param_groups": self.named_groups(), "zero_1": self._position()}

    def _position(self) -> dict[str, Any]:
        own = [self.names[index] for index in self._own]
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
        live = self.named_state()
        for name, state in saved["state"].items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    live[name][key].copy_(value)
            self.load_named_values(name, {k: value for k, value in state.items() if not isinstance(value, Tensor)})

    def state_bytes(self) -> int:
        """Bytes of optimizer state that this rank holds, master weights included."""
        tensors = [value for state in self.named_state().values() for value in state.values()]
        return sum(value.nbytes for value in tensors if isinstance(value, Tensor))
