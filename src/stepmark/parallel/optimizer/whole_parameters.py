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
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.errors import UsageError
from stepmark.parallel.optimizer.gathered_parameters import GatheredParameters, Round, divide, make_rounds
from stepmark.parallel.optimizer.named import Distribution, Groups, Held
from stepmark.parallel.optimizer.replicated import Replicated
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.layout import Layout, layout_of
from stepmark.sharding.replication import replication_of


class WholeParameters(Distribution):
    """This rank's parameters, each of them complete.

    Args:
        groups: The optimizer's groups.
        mesh: The mesh.
        order: See `Distribution`.
        zero_1: Divide the parameters over the data parallel ranks.
        elementwise_group: Whether the optimizer updates a group's parameters element by element, so that shards of them
            will do.
        master_weights: As in `Replicated`.
        bucket_elements: What a rank sends at most at a time; None: the default.
    """

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
        super().__init__(groups, order=order, bucket_elements=bucket_elements)
        self._mesh = mesh
        self._axis = mesh.data_parallel
        self.divided_by = "zero_1" if zero_1 else None
        parameters = dict(zip(self.names, self.parameters, strict=True))
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
