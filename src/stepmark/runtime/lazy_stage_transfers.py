"""Transfers between pipeline stages on lazy devices.

Stages run different graphs, so what two of them exchange has a graph of its own, the same on both, which only they run:
an all-gather of two, of which each takes the other's part by an index that is device data. XLA wants every replica to
be named in one of the collective's groups, also those that do not run it, and all groups of one size; links that share
no rank are therefore groups of one graph, and what is left over is paired arbitrarily. Where one replica remains, an
all-reduce takes the place of the all-gather, whose groups need not be equal.

Where PJRT has no collectives (processes of XLA's CPU client), transfers go through the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from stepmark.runtime.collectives import GraphCollectives
from stepmark.runtime.rank_grid import group_of, linked_groups, links_of_color
from stepmark.runtime.stage_transfers import Exchange, Form, HostLinks
from stepmark.runtime.xla import XlaRuntime, all_gather_in_graph, all_reduce_in_graph


class SeparateGraphs(GraphCollectives):
    """An axis among ranks that run different graphs: each collective is a graph of its own."""

    def __init__(self, runtime: XlaRuntime, rank: int, ranks: Sequence[int], groups: list[list[int]] | None) -> None:
        """`ranks`: this rank's group. `groups`: all groups; None: one group of all ranks."""
        super().__init__(runtime, list(ranks).index(rank), len(ranks), groups)
        self._ranks = list(ranks)

    def _recorded(self, operations: Iterator[Tensor]) -> list[Tensor]:
        runtime = self._runtime
        assert isinstance(runtime, XlaRuntime)
        runtime.step_boundary()
        results = list(operations)
        runtime.boundary_among(self._ranks)
        return results


class GraphLinks:
    """Links whose transfers are graphs. See `StageLinks`."""

    def __init__(self, runtime: XlaRuntime, on_host: HostLinks, rank: int, pipelines: Sequence[list[int]]) -> None:
        """`pipelines`: the ranks of every pipeline, in the order of the stages."""
        self._runtime = runtime
        self.exchange_on_host = on_host.exchange_on_host
        self._pipelines = pipelines
        self._ranks = group_of(rank, pipelines)
        self._stage = self._ranks.index(rank)
        self._placed: dict[object, Tensor] = {}

    def exchange(self, other: int, outgoing: Sequence[Tensor], incoming: Sequence[Form]) -> Exchange:
        """One graph for one tensor of each rank, where all are of one form; otherwise one for each tensor."""
        self._runtime.step_boundary()  # what is pending differs between the two
        received: list[Tensor] = []
        for mine, theirs in self._turns(other, outgoing, incoming):
            form = Form.of(mine) if mine is not None else theirs
            assert form is not None
            sent = self._zeros(form) if mine is None else mine.detach()
            found = self._swapped(other, sent)
            if theirs is not None:
                received.append(found)
        return Exchange.done(received)

    def _turns(
        self, other: int, outgoing: Sequence[Tensor], incoming: Sequence[Form]
    ) -> list[tuple[Tensor | None, Form | None]]:
        """What this rank sends and expects, graph by graph; the same graphs on both ranks."""
        if len({*incoming, *map(Form.of, outgoing)}) == 1:
            return list(zip_longest(outgoing, incoming))
        sending: list[tuple[Tensor | None, Form | None]] = [(tensor, None) for tensor in outgoing]
        expecting: list[tuple[Tensor | None, Form | None]] = [(None, form) for form in incoming]
        return [*sending, *expecting] if self._stage < other else [*expecting, *sending]

    def _swapped(self, other: int, tensor: Tensor) -> Tensor:
        """What the other rank has for this one."""
        pair = first, second = min(self._stage, other), max(self._stage, other)
        groups = linked_groups(self._pipelines, links_of_color(first, second, len(self._ranks)))
        exchange = self._gathered if all(len(group) == 2 for group in groups) else self._summed
        found = exchange(tensor, groups, pair.index(self._stage))
        self._runtime.boundary_among([self._ranks[each] for each in pair])
        return found

    def _gathered(self, tensor: Tensor, groups: list[list[int]], position: int) -> Tensor:
        flat = tensor.reshape(1) if tensor.dim() == 0 else tensor
        rows = flat.shape[0]
        index = self._place((rows, position), torch.arange(rows) + (1 - position) * rows)
        both = all_gather_in_graph(flat, 0, groups)
        return both.index_select(0, index).reshape(tensor.shape)

    def _summed(self, tensor: Tensor, groups: list[list[int]], position: int) -> Tensor:
        """By an all-reduce of both parts, each zero where it is the other's."""
        own = self._place(("own", position, tensor.dim()), torch.arange(2).reshape(2, *[1] * tensor.dim()) == position)
        other = self._place(("other", position), torch.tensor([1 - position]))
        parts = torch.where(own, tensor.unsqueeze(0), torch.zeros_like(tensor))
        return all_reduce_in_graph(parts, "sum", groups).index_select(0, other).squeeze(0)

    def _zeros(self, form: Form) -> Tensor:
        return self._place(form, torch.zeros(form.shape, dtype=form.dtype))

    def _place(self, key: object, value: Tensor) -> Tensor:
        """A value that is device data, never a constant of the graph."""
        if key not in self._placed:
            self._placed[key] = self._runtime.place(value)
        return self._placed[key]


class BridgeLinks:
    """Links through the host: what is pending runs, and what is sent is copied. See `StageLinks`."""

    def __init__(self, runtime: XlaRuntime, on_host: HostLinks) -> None:
        self._runtime = runtime
        self.exchange_on_host = on_host.exchange_on_host

    def exchange(self, other: int, outgoing: Sequence[Tensor], incoming: Sequence[Form]) -> Exchange:
        self._runtime.step_boundary()
        sent = [tensor.contiguous() for tensor in self._runtime.to_host([each.detach() for each in outgoing])]
        exchange = self.exchange_on_host(other, sent, incoming)
        exchange.received = list(self._runtime.place(exchange.arrived()))
        return exchange
