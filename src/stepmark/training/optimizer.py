"""Optimizers over named parameters, with fp32 master weights for bf16 parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.config.optimizers import ADAFACTOR, ADAMW, ADAMW_8BIT, WHOLE_PARAMETERS, check_optimizer
from stepmark.errors import UsageError
from stepmark.optim.eight_bit import EIGHT_BITS, FULL_PRECISION, adamw_8bit_class
from stepmark.optim.lazy_optimizers import LazyAdamW, LazySGD
from stepmark.optim.master_weights import WrittenParameters, follow
from stepmark.optim.protocols import StepOptimizer
from stepmark.optim.wrapped import (
    load_hyperparameters,
    load_learning_rates,
    load_plain_values,
    plain,
    take_empty_step,
)
from stepmark.parallel.data_parallel import DataParallelGradients
from stepmark.parallel.zero.sharded_optimizer import MASTER, ShardedOptimizer
from stepmark.runtime.base import Runtime
from stepmark.runtime.host_group import HostGroup
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.layout import Shard, layout_of
from stepmark.training.parameter_kinds import ParameterKinds


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
    ) -> None:
        """`groups`: as for `torch.optim`, but "params" is a list of (name, parameter). `make` creates the optimizer
        from groups with the tensors to update. `order`: the names in the model's order, which `parameters` follows, so
        that sums over all gradients do not depend on the groups."""
        self._runtime = runtime
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
        self._written = WrittenParameters([parameter for parameter, _ in self._masters])

    @classmethod
    def around(
        cls, optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], runtime: Runtime
    ) -> ParameterOptimizer:
        """Wraps an optimizer that the user created over the model's parameters; `names` are the model's."""
        groups = []
        for group in optimizer.param_groups:
            if any(parameter not in names for parameter in group["params"]):
                raise UsageError(
                    "optimizers: the optimizer holds a parameter that is not in the model; create it from "
                    "model.parameters()"
                )
            groups.append({**group, "params": [(names[parameter], parameter) for parameter in group["params"]]})
        made = cls(groups, lambda _: optimizer, runtime, order=list(names.values()), master_weights=False)
        made.given = True
        return made

    def _add(self, name: str, parameter: nn.Parameter, master_weights: bool) -> Tensor:
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

    def gradients(self, mesh: Mesh, *, accumulation: int) -> DataParallelGradients:
        """Makes the reducer of the gradients that `set_gradients` takes."""
        return DataParallelGradients(self.parameters, mesh, accumulation=accumulation)

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


def build_optimizer(
    name: str,
    named_parameters: Sequence[tuple[str, nn.Parameter]],
    runtime: Runtime,
    *,
    decay: Callable[[str], bool] = lambda name: True,
    kinds: ParameterKinds | None = None,
    learning_rate: float = 5e-5,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
    options: Mapping[str, Any] | None = None,
    sharded_over: Mesh | None = None,
    stages: HostGroup | None = None,
) -> StepOptimizer:
    """Creates an optimizer over the parameters that require gradients.

    Args:
        name: One of OPTIMIZERS.
        named_parameters: `list(model.named_parameters())`, on the device.
        runtime: The device.
        decay: Whether weight decay applies to the parameter of a name. Default: to all.
        kinds: What the parameters are for, from `parameter_kinds(model)`. With `adamw_8bit`, embeddings have a state of
            32 bits; None: all states of at least `min_8bit_size` elements have 8.
        learning_rate: Default 5e-5.
        weight_decay: Default 0.
        betas: Of AdamW.
        epsilon: Of AdamW.
        options: Further arguments of the optimizer: `momentum` and `nesterov` of SGD, `amsgrad` of AdamW,
            `clip_threshold` and `beta1` of Adafactor, `min_8bit_size` of 8-bit AdamW.
        sharded_over: The mesh over whose data parallel ranks the state is sharded (ZeRO-1); None: not sharded.
        stages: All ranks, where they hold different parameters: then they agree on the groups, and a rank may have an
            empty one. None: all ranks have all groups.

    Returns:
        The optimizer for `TrainStep` and `Checkpointer`.

    Raises:
        UsageError: The name or an option is unknown, the optimizer's library is not installed, or it needs complete
            parameters and they are sharded.
    """
    check_optimizer(name)
    trained = [(key, parameter) for key, parameter in named_parameters if parameter.requires_grad]
    groups = [
        {"params": [item for item in items if decay(item[0]) == decays], "weight_decay": rate, **own}
        for items, own in _by_kind(name, trained, kinds or ParameterKinds())
        for decays, rate in ((True, weight_decay), (False, 0.0))
    ]
    keywords: dict[str, Any] = {"lr": learning_rate, **(options or {})}
    if name == ADAFACTOR:
        keywords = {"scale_parameter": False, "relative_step": False, **keywords}
    if name in WHOLE_PARAMETERS:
        _check_complete(name, [parameter for _, parameter in trained], runtime)
    if name in (*ADAMW, *ADAMW_8BIT):
        keywords = {"betas": betas, "eps": epsilon, **keywords}
    kind = _class_of(name, runtime, keywords)

    def make(inner_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        try:
            return kind(inner_groups, **keywords)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"optim_args: {name} does not accept {dict(options or {})}: {error}") from error

    present = [bool(group["params"]) for group in groups]
    if stages is not None:
        present = [any(found) for found in zip(*stages.all_gather(present), strict=True)]
    used = [group for group, there in zip(groups, present, strict=True) if there]
    if sharded_over is not None:
        return ShardedOptimizer(used, make, sharded_over)
    return ParameterOptimizer(used, make, runtime, order=[key for key, _ in named_parameters])


def _by_kind(
    name: str, trained: Sequence[tuple[str, nn.Parameter]], kinds: ParameterKinds
) -> list[tuple[list[tuple[str, nn.Parameter]], dict[str, Any]]]:
    """The parameters that the optimizer treats alike, and what their groups say of that."""
    if name not in ADAMW_8BIT:
        return [(list(trained), {})]
    return [
        ([item for item in trained if item[0] not in kinds.embeddings], EIGHT_BITS),
        ([item for item in trained if item[0] in kinds.embeddings], FULL_PRECISION),
    ]


def _check_complete(name: str, parameters: Sequence[nn.Parameter], runtime: Runtime) -> None:
    """Raises UsageError where the optimizer would see parts of parameters, or cannot run on the device."""
    if runtime.lazy and name == ADAFACTOR:
        raise UsageError(
            f"optim: adafactor changes its graph with every step, so {runtime.name} cannot use it; use AdamW"
        )
    if runtime.lazy:
        raise UsageError(f"optim: {name} has no kernels for {runtime.name}; use AdamW")
    if any(layout_of(parameter) is not None for parameter in parameters):
        raise UsageError(f"optim: {name} needs complete parameters; set tensor_parallel_size to 1, or use AdamW")


def _class_of(name: str, runtime: Runtime, keywords: dict[str, Any]) -> type[torch.optim.Optimizer]:
    if name == ADAFACTOR:
        from transformers.optimization import Adafactor

        return Adafactor
    if name in ADAMW_8BIT:
        return adamw_8bit_class()
    if runtime.lazy:
        return LazyAdamW if name in ADAMW else LazySGD
    if name == "adamw_torch_fused":
        keywords["fused"] = True
    return torch.optim.AdamW if name in ADAMW else torch.optim.SGD
