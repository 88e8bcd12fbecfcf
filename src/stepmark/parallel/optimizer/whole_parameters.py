"""Whole parameters for optimizers that use a parameter's norm, its rows and columns, or blocks of it.

With ZeRO-1 every data parallel rank updates some of the parameters, and holds the state and the fp32 master weights of
these alone. A parameter that tensor parallelism has sharded belongs to one of the tensor parallel ranks, which holds
all of it. Phases of a step: gradients are averaged over the ranks as in plain data parallelism; the shards of each are
brought together (`GatheredParameters`); each rank updates its own parameters; the shards of their new values go back,
and with ZeRO-1 new values are all-gathered, in rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.errors import UsageError
from stepmark.parallel.gradients.reducer import GradientReducer, mean_gradients
from stepmark.parallel.optimizer.elementwise import sharding_unit
from stepmark.parallel.optimizer.gathered_parameters import GatheredParameters, Round, divide, make_rounds
from stepmark.parallel.optimizer.named import Groups, Held, Make, NamedOptimizer, named_around
from stepmark.parallel.optimizer.replicated import Replicated
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.layout import Layout, layout_of
from stepmark.sharding.replication import replication_of


class WholeParameters:
    """This rank's parameters, each of them complete; see `Distribution`.

    Args:
        groups: The optimizer's groups.
        mesh: The mesh.
        order: The names in the model's order; None: that of the groups.
        zero_1: Divide the parameters over the data parallel ranks.
        elementwise_group: Whether the optimizer updates a group's parameters element by element, so that shards of them
            will do.
        master_weights: As in `Replicated`.
        bucket_elements: What a rank sends at most at a time; None: the default.
    """

    separate = True

    def __init__(
        self,
        groups: Groups,
        mesh: Mesh,
        *,
        order: Sequence[str] | None = None,
        zero_1: bool = True,
        elementwise_group: Callable[[Mapping[str, Any]], bool] = lambda group: False,
        master_weights: bool = True,
        bucket_elements: int | None = None,
    ) -> None:
        self._mesh = mesh
        self._axis = mesh.data_parallel
        self._bucket_elements = bucket_elements
        self.divided_by: str | None = "zero_1" if zero_1 else None
        self.groups = [[name for name, _ in group["params"]] for group in groups]
        parameters = {name: parameter for group in groups for name, parameter in group["params"]}
        self.names = [name for name in order or parameters if name in parameters]
        self.parameters = [parameters[name] for name in self.names]
        experts = [name for name in self.names if replication_of(parameters[name], 1).experts]
        if experts:
            raise UsageError(
                f"expert_parallel_size: data parallel ranks hold different experts of {experts[0]}, and the optimizer "
                "uses complete parameters; choose an elementwise one such as AdamW, or divisor of tensor_parallel_size"
            )
        owners, sizes = [self._axis.rank] * len(self.names), [parameter.numel() for parameter in self.parameters]
        if zero_1:
            owners = divide(sizes, self._axis.size)
        mine = [name for name, owner in zip(self.names, owners, strict=True) if owner == self._axis.rank]
        elementwise = {name for group in groups if elementwise_group(group) for name, _ in group["params"]}
        self._gathered: GatheredParameters | None = None
        self._gathered_names: list[str] = []  # of mine, those of which tensor parallelism left a shard that will not do
        if not mesh.runtime.lazy and mesh.tensor_parallel.size > 1:
            mine_sharded = [name for name in mine if layout_of(parameters[name]) is not None]
            self._gathered_names = [name for name in mine_sharded if name not in elementwise]
            self._gathered = GatheredParameters(
                [parameters[name] for name in self._gathered_names],
                mesh,
                master_weights=master_weights,
                round_elements=bucket_elements,
            )
        own: dict[str, nn.Parameter] = {
            name: parameters[name] for name in mine if name not in set(self._gathered_names)
        }
        complete = self._gathered.complete if self._gathered is not None else {}
        own.update({self._gathered_names[index]: tensor for index, tensor in complete.items()})
        self._own = Replicated(
            [{"params": [(name, own[name]) for name in names if name in own]} for names in self.groups],
            mesh.runtime,
            order=self.names,
            master_weights=master_weights,
        )
        self.held = [self._complete(held, parameters) for held in self._own.held]
        self.arrivals = self._own.arrivals
        self.place = {"mesh": mesh.shape, "rank": mesh.context.world.rank, "parameters": self._own.names}
        self._rounds: list[Round] = []
        if zero_1 and self._axis.size > 1:
            self._rounds = make_rounds(self.parameters, sizes, owners, self._axis.size, bucket_elements)

    def _complete(self, held: Held, parameters: Mapping[str, nn.Parameter]) -> Held:
        """A parameter that was gathered has another layout, and perhaps another dtype, than this rank's shard of it."""
        name = str(held.key)
        if name not in self._gathered_names:
            return held
        layout = Layout.full(tuple(held.tensor.shape))
        return replace(held, members=((name, layout),), master=held.tensor.dtype != parameters[name].dtype)

    def gradients(self, mesh: Mesh, **options: Any) -> GradientReducer:
        named = list(zip(self.names, self.parameters, strict=True))
        return mean_gradients(named, mesh, bucket_elements=self._bucket_elements, **options)

    def assigned(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """`gradients`: of each of `parameters`. Shards are brought together."""
        found = dict(zip(self.names, gradients, strict=True))
        if self._gathered is not None and any(gradient is not None for gradient in gradients):
            complete = self._gathered.gradients([found[name] for name in self._gathered_names])
            found.update({self._gathered_names[index]: gradient for index, gradient in complete.items()})
        return [found[str(held.key)] for held in self.held]

    def follow(self) -> None:
        if self._gathered is not None:
            self._gathered.refresh()
        self._own.follow()

    def publish(self) -> None:
        """Sends shards of new values back, and with ZeRO-1 all-gathers them, in rounds."""
        self._own.publish()
        if self._gathered is not None:
            self._gathered.publish()
        for each in self._rounds:
            self._publish(each)

    def _publish(self, each: Round) -> None:
        """All-gathers the parameters of a round; each rank's are padded to the same length."""
        sent = [[self.parameters[index] for index in indices] for indices in each]
        dtype = next(parameter.dtype for parameters in sent for parameter in parameters)
        sizes = [[parameter.numel() for parameter in parameters] for parameters in sent]
        length = max(map(sum, sizes))
        padding = torch.zeros(length - sum(sizes[self._axis.rank]), dtype=dtype, device=self._mesh.runtime.device)
        own = [parameter.reshape(-1) for parameter in sent[self._axis.rank]]
        (gathered,) = self._axis.all_gather([torch.cat([*own, padding])])
        for rank, values in enumerate(gathered.split(length)):
            if rank != self._axis.rank:
                parts = values[: sum(sizes[rank])].split(sizes[rank])
                for parameter, part in zip(sent[rank], parts, strict=True):
                    parameter.copy_(part.view(parameter.shape))


def whole_parameters(groups: Groups, make: Make, mesh: Mesh, *, given: bool = False, **options: Any) -> NamedOptimizer:
    """An optimizer over whole parameters; for the arguments see `NamedOptimizer`, for `options` `WholeParameters`.
    Collective.

    Raises:
        UsageError: The device is lazy, or the optimizer needs all parameters at once.
    """
    distribution = WholeParameters(groups, mesh, **options)
    made = NamedOptimizer(distribution, groups, make, mesh.runtime, given=given)
    kind = type(made.inner)
    sharding_unit(kind, distribution.divided_by or "tensor_parallel_size")
    if mesh.runtime.lazy:
        raise UsageError(
            f"zero_1: {kind.__name__} uses complete parameters, which each belong to one rank, and the ranks of "
            f"{mesh.runtime.name} run one graph; choose an elementwise optimizer, or switch zero_1 off"
        )
    return made


def whole_parameters_around(
    optimizer: torch.optim.Optimizer,
    names: Mapping[nn.Parameter, str],
    mesh: Mesh,
    *,
    bucket_elements: int | None = None,
) -> NamedOptimizer:
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

    distribute = partial(
        WholeParameters,
        mesh=mesh,
        order=list(names.values()),
        zero_1=False,
        master_weights=False,
        bucket_elements=bucket_elements,
    )
    return named_around(optimizer, names, distribute, mesh.runtime)
