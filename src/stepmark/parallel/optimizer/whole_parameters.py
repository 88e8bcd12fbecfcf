"""Whole parameters for optimizers that use a parameter's norm, its rows and columns, or blocks of it.

With ZeRO-1 every data parallel rank updates some of the parameters, and holds the state and the fp32 master weights of
these alone. A parameter that tensor parallelism has sharded belongs to one of the tensor parallel ranks, which holds
all of it. Phases of a step: gradients are averaged over the ranks as in plain data parallelism; the shards of each are
brought together (`GatheredParameters`); each rank updates its own parameters; the shards of their new values go back,
and with ZeRO-1 new values are all-gathered, in rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.errors import UsageError
from stepmark.filesystem.sizes import in_groups
from stepmark.parallel.gradients.reduced import Used
from stepmark.parallel.optimizer.named import Groups, OptimizerSharding, OptimizerTensor
from stepmark.parallel.optimizer.replicated import Replicated, follow
from stepmark.runtime.collectives import GroupCollectives
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.layout import Layout, layout_of
from stepmark.sharding.replication import replication_of
from stepmark.sharding.views import block_views, narrow

ROUND_ELEMENTS = 8 * 2**20  # of one rank: the full bandwidth, and little memory beside the model
Round = tuple[list[str], ...]  # for each rank the parameters that it sends, end to end


def divide(costs: Mapping[str, int], ranks: int) -> dict[str, int]:
    """The rank of each item, the same everywhere: the costliest first, each to the cheapest rank (Graham 1969)."""
    totals, owners = [0] * ranks, {}
    for name in sorted(costs, key=lambda name: -costs[name]):
        owners[name] = min(range(ranks), key=totals.__getitem__)
        totals[owners[name]] += costs[name]
    return owners


def make_rounds(
    parameters: Mapping[str, Tensor], sizes: Mapping[str, int], owners: Mapping[str, int], ranks: int, limit: int | None
) -> list[Round]:
    """Rounds, each of parameters of one dtype, in which every parameter is sent once, by its owner; a rank sends at
    most `limit` elements at a time (None: ROUND_ELEMENTS), or one parameter. `sizes` are their elements."""
    rounds: list[Round] = []
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters.values()):
        same = [name for name, parameter in parameters.items() if parameter.dtype == dtype]
        owned = [[name for name in same if owners[name] == rank] for rank in range(ranks)]
        sent = [in_groups(own, [sizes[name] for name in own], limit or ROUND_ELEMENTS) for own in owned]
        rounds += zip_longest(*sent, fillvalue=[])
    return rounds


class GatheredParameters:
    """Sharded parameters by name, the same ones on all ranks of the tensor parallel axis, over which they are divided
    by their complete sizes. Ranks exchange as much as fits into a round at a time. Collective.

    Attributes:
        complete: Of each parameter that this rank owns the complete tensor that an optimizer updates: float32, or with
            `master_weights=False` of the parameter's dtype.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], mesh: Mesh, *, master_weights: bool, round_elements: int | None
    ) -> None:
        assert isinstance(mesh.tensor_parallel, GroupCollectives)
        self._axis = mesh.tensor_parallel
        self._parameters = dict(parameters)
        own = {name: layout_of(each) or Layout.full(each.shape) for name, each in parameters.items()}
        told = ([Layout.of(*each) for each in layouts] for layouts in self._axis.gather_objects(list(own.values())))
        self._layouts = [dict(zip(own, layouts, strict=True)) for layouts in told]  # by rank
        sizes = {name: math.prod(layout.shape) for name, layout in own.items()}
        owners = divide(sizes, self._axis.size)
        self._rounds = make_rounds(parameters, sizes, owners, self._axis.size, round_elements)
        self.complete: dict[str, nn.Parameter] = {}
        for name, layout in own.items():
            if owners[name] == self._axis.rank:
                dtype = torch.float32 if master_weights else parameters[name].dtype
                zeros = torch.zeros(layout.shape, dtype=dtype, device=mesh.runtime.device)
                self.complete[name] = nn.Parameter(zeros)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Gives the complete tensors the parameters' values, so that what a script writes to a parameter is kept.
        Master weights stay where they are the same up to rounding."""
        for name, value in self._gather({name: parameter.detach() for name, parameter in self._parameters.items()}):
            follow(self.complete[name], value)

    @torch.no_grad()
    def gradients(self, shards: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """The complete gradients (float32) of the parameters that this rank owns. None where its own shard has none:
        the parameter took no part in the step, and the other ranks have none either."""
        present = {}
        for name, parameter in self._parameters.items():
            shard = shards[name]
            present[name] = torch.zeros(parameter.shape, device=parameter.device) if shard is None else shard.float()
        return {name: None if shards[name] is None else value for name, value in self._gather(present)}

    @torch.no_grad()
    def publish(self) -> None:
        """Gives every rank its shards of the complete tensors, rounded to the parameters' dtype."""
        rank = self._axis.rank
        for runs in self._rounds:
            dtype = next(self._parameters[name].dtype for run in runs for name in run)
            sent = [
                [part.to(dtype) for name in runs[rank] for part in _boxes(self.complete[name], layouts[name])]
                for layouts in self._layouts
            ]
            counts = [self._elements(rank, run) for run in runs]
            for run, flat in zip(runs, self._exchange(sent, counts, dtype), strict=True):
                targets = [self._parameters[name] for name in run]
                live = [each if each.is_contiguous() else each.contiguous() for each in targets]
                pairs = zip(live, run, strict=True)
                _fill([view for each, name in pairs for view in _views(each, self._layouts[rank][name])], flat)
                for target, each in zip(targets, live, strict=True):
                    if each is not target:
                        target.copy_(each)

    def _gather(self, shards: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The name and the complete tensor of each parameter that this rank owns; `shards` are of all."""
        rank = self._axis.rank
        for runs in self._rounds:
            dtype = next(shards[name].dtype for run in runs for name in run)
            sent = [[v for name in run for v in _views(shards[name], self._layouts[rank][name])] for run in runs]
            counts = [self._elements(other, runs[rank]) for other in range(self._axis.size)]
            found = {name: shards[name].new_zeros(self._layouts[rank][name].shape) for name in runs[rank]}
            for layouts, flat in zip(self._layouts, self._exchange(sent, counts, dtype), strict=True):
                _fill([box for name, tensor in found.items() for box in _boxes(tensor, layouts[name])], flat)
            yield from found.items()

    def _elements(self, rank: int, run: Sequence[str]) -> int:
        """The elements that a rank holds of these parameters."""
        return sum(part.slice.numel for name in run for part in self._layouts[rank][name].parts)

    def _exchange(self, sent: Sequence[Sequence[Tensor]], counts: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Sends each rank its tensors, end to end; `counts` elements come from each."""
        device = next(iter(self._parameters.values())).device
        flat = [each.reshape(-1).to(device, dtype) for tensors in sent for each in tensors]
        elements = [sum(each.numel() for each in tensors) for tensors in sent]
        (arrived,) = self._axis.all_to_all(
            [torch.cat([torch.empty(0, device=device, dtype=dtype), *flat])], elements, counts
        )
        return list(arrived.split(list(counts)))


def _views(tensor: Tensor, layout: Layout) -> list[Tensor]:
    """What a local tensor holds, box by box."""
    parts = layout.parts
    return [view for part in parts for _, view in block_views(tensor, part, 0, part.slice.numel)]


def _boxes(complete: Tensor, layout: Layout) -> list[Tensor]:
    """The same boxes of the complete tensor."""
    return [narrow(complete, block.box) for part in layout.parts for block in part.slice.blocks()]


def _fill(views: Sequence[Tensor], flat: Tensor) -> None:
    """Copies the elements of `flat` to the views, one after the other."""
    for view, values in zip(views, flat.split([view.numel() for view in views]), strict=True):
        view.copy_(values.view(view.shape))


class WholeParameters(OptimizerSharding):
    """This rank's parameters, each of them complete; with `zero_1` they are divided over the data parallel ranks. Of a
    group that `elementwise_group`, a static method of the optimizer's class, says is updated element by element, shards
    will do. A rank sends at most `bucket_elements` at a time. For the other arguments see `Replicated`."""

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
        self._named = dict(zip(self.names, self.parameters, strict=True))
        experts = [name for name in self.names if replication_of(self._named[name], 1).experts]
        if experts:
            raise UsageError(
                f"expert_parallel_size: data parallel ranks hold different experts of {experts[0]}, and the optimizer "
                "uses complete parameters; choose an elementwise one such as AdamW, or divisor of tensor_parallel_size"
            )
        sizes = {name: parameter.numel() for name, parameter in self._named.items()}
        owners = divide(sizes, self._axis.size) if zero_1 else dict.fromkeys(sizes, self._axis.rank)
        elementwise = {name for group in groups if elementwise_group(group) for name, _ in group["params"]}
        self._gathered: GatheredParameters | None = None
        self._needed: dict[str, nn.Parameter] = {}  # of mine, those of which a shard is here, and will not do
        own = {name: each for name, each in self._named.items() if owners[name] == self._axis.rank}
        if not mesh.runtime.lazy and mesh.tensor_parallel.size > 1:
            sharded = {name: each for name, each in own.items() if layout_of(each) is not None}
            self._needed = {name: each for name, each in sharded.items() if name not in elementwise}
            self._gathered = GatheredParameters(
                self._needed, mesh, master_weights=master_weights, round_elements=bucket_elements
            )
            own = {name: each for name, each in own.items() if name not in self._needed} | self._gathered.complete
        self._own = Replicated(
            [{"params": [(name, own[name]) for name in names if name in own]} for names in self.groups],
            mesh.runtime,
            order=self.names,
            master_weights=master_weights,
        )
        self.held = [self._complete(held) for held in self._own.held]
        self.place = {"mesh": mesh.shape, "rank": mesh.context.world.rank, "parameters": self._own.names}
        self._rounds: list[Round] = []
        if zero_1 and self._axis.size > 1:
            self._rounds = make_rounds(self._named, sizes, owners, self._axis.size, bucket_elements)

    def _complete(self, held: OptimizerTensor) -> OptimizerTensor:
        """A parameter that was gathered has another layout, and perhaps another dtype, than this rank's shard of it."""
        name = str(held.key)
        if name not in self._needed:
            return held
        layout = Layout.full(held.tensor.shape)
        return replace(held, members=((name, layout),), master=held.tensor.dtype != self._needed[name].dtype)

    def assigned(self, gradients: Sequence[Tensor | None], used: Used | None) -> list[Tensor | None]:
        """`gradients`: of each of `parameters`. Shards are brought together."""
        found = dict(zip(self.names, gradients, strict=True))
        if self._gathered is not None and any(gradient is not None for gradient in gradients):
            found |= self._gathered.gradients(found)
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
        sent = [[self._named[name] for name in names] for names in each]
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
