"""An optimizer over named parameters, with fp32 master weights for bf16 parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.checkpoint.format.rows import MASTER
from stepmark.errors import UsageError
from stepmark.parallel.buckets import check_real
from stepmark.parallel.gradients.reducer import GradientReducer, mean_gradients
from stepmark.parallel.optimizer.arrivals import Arrivals
from stepmark.parallel.optimizer.master_weights import WrittenParameters, follow
from stepmark.parallel.optimizer.wrapped import (
    load_hyperparameters,
    load_learning_rates,
    load_plain_values,
    plain,
    take_empty_step,
)
from stepmark.runtime.base import Runtime
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.layout import Shard, layout_of


class ParameterOptimizer:
    """A `torch.optim` optimizer whose state is keyed by parameter names.

    Where a parameter is not fp32 and `master_weights` is set, the optimizer updates an fp32 copy, and the parameter is
    that copy rounded.

    Attributes:
        given: Whether the user has made the optimizer: then its groups are restored completely, and those of one that
            the arguments describe keep the arguments' values.
    """

    given = False

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        runtime: Runtime,
        *,
        order: Sequence[str],
        master_weights: bool = True,
        bucket_elements: int | None = None,
    ) -> None:
        """`groups`: as for `torch.optim`, but "params" is a list of (name, parameter). `make` creates the optimizer
        from groups with the tensors to update. `order`: the names in the model's order, which `parameters` follows, so
        that sums over all gradients do not depend on the groups. `bucket_elements`: how many gradients are sent at a
        time; None: by the device."""
        self._runtime = runtime
        self._bucket_elements = bucket_elements
        self.arrivals = Arrivals()
        self.names: list[str] = []
        self.parameters: list[nn.Parameter] = []
        self._updated: list[Tensor] = []
        inner_groups: list[dict[str, Any]] = []
        for group in groups:
            updated = [self._add(name, parameter, master_weights) for name, parameter in group["params"]]
            inner_groups.append({**group, "params": updated})
        self.inner = make(inner_groups)
        position = {name: index for index, name in enumerate(order)}
        in_order = sorted(range(len(self.names)), key=lambda index: position[self.names[index]])
        self.names = [self.names[index] for index in in_order]
        self.parameters = [self.parameters[index] for index in in_order]
        self._updated = [self._updated[index] for index in in_order]
        pairs = zip(self.parameters, self._updated, strict=True)
        self._masters = [(parameter, master) for parameter, master in pairs if master is not parameter]
        self._written = WrittenParameters([parameter for parameter, _ in self._masters], runtime)

    @classmethod
    def around(
        cls,
        optimizer: torch.optim.Optimizer,
        names: Mapping[nn.Parameter, str],
        runtime: Runtime,
        *,
        bucket_elements: int | None = None,
    ) -> ParameterOptimizer:
        """Wraps an optimizer that the user created over the model's parameters; `names` are the model's."""
        groups = []
        for group in optimizer.param_groups:
            if any(parameter not in names for parameter in group["params"]):
                raise UsageError(
                    "optimizers: the optimizer holds a parameter that is not in the model, so that no checkpoint would "
                    "have it; make its module part of the model (model.criterion = …), or leave it out"
                )
            groups.append({**group, "params": [(names[parameter], parameter) for parameter in group["params"]]})
        made = cls(
            groups,
            lambda _: optimizer,
            runtime,
            order=list(names.values()),
            master_weights=False,
            bucket_elements=bucket_elements,
        )
        made.given = True
        return made

    def _add(self, name: str, parameter: nn.Parameter, master_weights: bool) -> Tensor:
        check_real(name, parameter)
        self.names.append(name)
        self.parameters.append(parameter)
        updated: Tensor = parameter
        if master_weights and parameter.dtype != torch.float32:
            (on_host,) = self._runtime.to_host([parameter])
            updated = nn.Parameter(self._runtime.place(on_host.float()))
        self._updated.append(updated)
        return updated

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    def gradients(
        self, mesh: Mesh, *, accumulation: int, reduce_dtype: torch.dtype = torch.float32, on_arrival: bool = False
    ) -> GradientReducer:
        """Makes the reducer of the gradients that `set_gradients` takes."""
        named = list(zip(self.names, self.parameters, strict=True))
        return mean_gradients(
            named,
            mesh,
            accumulation=accumulation,
            reduce_dtype=reduce_dtype,
            bucket_elements=self._bucket_elements,
            on_arrival=on_arrival,
        )

    def set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Sets the gradient, or None, of each of `parameters`."""
        for tensor, gradient in zip(self._updated, gradients, strict=True):
            tensor.grad = gradient if gradient is None or gradient.dtype == tensor.dtype else gradient.to(tensor.dtype)

    @torch.no_grad()
    def step(self) -> None:
        self._follow_written()
        self.inner.step()
        for parameter, master in self._masters:
            parameter.copy_(master)
        self._written.forget()

    def _follow_written(self) -> None:
        """Master weights of parameters that the script has written get their values."""
        if not self._runtime.lazy:
            for parameter, master in self._masters:
                follow(master, parameter)
        written = {id(parameter) for parameter in self._written.found()}
        for parameter, master in self._masters:
            if id(parameter) in written:
                self._runtime.write(master, follow(*self._runtime.to_host([master, parameter])))

    def ensure_state(self) -> None:
        """Creates the state that the first step would create, so that it can be restored in place.

        Takes a step with zero gradients and learning rate 0, and restores the parameters afterwards. The state's values
        are meaningless: call it only when they are about to be replaced. Existing states and gradients are kept.
        """
        missing = [tensor for tensor in self._updated if tensor not in self.inner.state]
        if not missing:
            return
        gradients = [tensor.grad for tensor in self._updated]
        for tensor in self._updated:
            tensor.grad = None
        saved = self._runtime.to_host(missing)
        take_empty_step(self.inner, missing, self._runtime)
        for tensor, value in zip(missing, saved, strict=True):
            self._runtime.write(tensor, value)
        for tensor, gradient in zip(self._updated, gradients, strict=True):
            tensor.grad = gradient

    def forget_state(self, names: Sequence[str]) -> bool:
        """Removes the state of these parameters, as before their first gradient.

        Returns False, and removes nothing, where the optimizer needs its state from the start (lazy devices).
        """
        if self._runtime.lazy:
            return False
        removed = set(names)
        for name, tensor in zip(self.names, self._updated, strict=True):
            if name in removed:
                self.inner.state.pop(tensor, None)
        return True

    def named_state(self) -> dict[str, dict[str, Any]]:
        """Parameter name to state: the inner optimizer's live tensors and values, and `master` where there are master
        weights."""
        states: dict[str, dict[str, Any]] = {}
        for name, parameter, updated in zip(self.names, self.parameters, self._updated, strict=True):
            state = dict(self.inner.state.get(updated, {}))
            if updated is not parameter:
                state[MASTER] = updated
            states[name] = {key: _with_layout(value, parameter) for key, value in state.items()}
        return states

    def named_groups(self) -> list[dict[str, Any]]:
        """The groups' plain hyperparameters, with parameter names instead of tensors."""
        name_of = {id(tensor): name for tensor, name in zip(self._updated, self.names, strict=True)}
        return [
            {
                key: [name_of[id(tensor)] for tensor in value] if key == "params" else plain(value)
                for key, value in group.items()
            }
            for group in self.param_groups
        ]

    def load_named_groups(self, groups: list[dict[str, Any]]) -> None:
        """Restores the saved learning rates, or all values of the groups of an optimizer that was given."""
        load = load_hyperparameters if self.given else load_learning_rates
        load(self.inner, groups, self._runtime)

    def load_named_values(self, name: str, values: Mapping[str, Any]) -> None:
        """Restores what the state of a parameter has besides tensors, such as a count of steps."""
        updated = self._updated[self.names.index(name)]
        load_plain_values(self.inner.state[updated], values)


def _with_layout(value: Any, parameter: Tensor) -> Any:
    """Annotates a state of the parameter's shape with the parameter's layout."""
    layout = layout_of(parameter)
    if layout is None or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    return Shard(value, layout)
