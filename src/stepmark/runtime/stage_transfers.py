"""Point-to-point transfers among the ranks of one pipeline.

Two ranks exchange tensors: each posts its sends and receives in one operation and continues to compute. Both have to
make their exchanges with each other in the same order. The caller keeps a sent tensor unchanged until `Exchange.left`.
Here are the transfers of eager devices and of the host; lazy_stage_transfers.py has those of lazy devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stepmark.liveness.host_group import Group, wait_for

HEADER = 12  # int64: the dtype's number, the number of dims, the dims
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Form:
    """The shape and dtype of an expected tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        return cls(tuple(tensor.shape), tensor.dtype)

    def encoded(self) -> Tensor:
        """As a tensor of HEADER numbers on the host."""
        values = [DTYPES.index(self.dtype), len(self.shape), *self.shape]
        return torch.tensor(values + [0] * (HEADER - len(values)))

    @classmethod
    def decoded(cls, header: Tensor) -> Form:
        dtype, dims, *sizes = header.tolist()
        return cls(tuple(sizes[:dims]), DTYPES[dtype])


ENCODED = Form((HEADER,), torch.int64)


@dataclass(eq=False)
class Exchange:
    """An exchange between two ranks; `received` must not be read before `arrived`, and `sent` is in use until `left`.
    The other two are what is pending."""

    sending: Sequence[dist.Work]
    sent: Sequence[Tensor]
    receiving: Sequence[dist.Work]
    received: list[Tensor]

    @classmethod
    def done(cls, received: list[Tensor]) -> Exchange:
        """An exchange with nothing to wait for."""
        return cls((), (), (), received)

    @property
    def over(self) -> bool:
        """Whether no transfer is pending, as far as this side has waited."""
        return not (self.sending or self.sent or self.receiving)

    def arrived(self) -> list[Tensor]:
        """Waits for the tensors of the other rank; on an accelerator its stream waits instead of the host."""
        wait_for(self.receiving)
        self.receiving = ()
        return self.received

    def left(self) -> None:
        """Returns once everything has been sent and received."""
        self.arrived()
        wait_for(self.sending)
        self.sending = self.sent = ()


class HostLinks(Protocol):
    """Transfers of host tensors between the ranks of one pipeline, by their coordinates on its axis."""

    def exchange_on_host(self, other: int, outgoing: Sequence[Tensor], incoming: Sequence[Form]) -> Exchange:
        """Starts an exchange with rank `other`, which expects the forms of `outgoing`."""


class StageLinks(HostLinks, Protocol):
    """The same with tensors of the device as well."""

    def exchange(self, other: int, outgoing: Sequence[Tensor], incoming: Sequence[Form]) -> Exchange:
        """Starts an exchange of the device's tensors with rank `other`, which expects the forms of `outgoing`."""


class GroupLinks:
    """Links between processes: a torch.distributed group. See `StageLinks`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """`group`: the pipeline's ranks, for tensors of the device and of the host."""
        self._group = Group(group)
        self._device = torch.device("cpu")

    def open(self, device: torch.device) -> None:
        """Opens the connections among all ranks. `device`: where tensors of the device are. Collective."""
        self._device = device
        dist.all_reduce(torch.zeros(1, device=device), group=self._group.process_group)

    def exchange(self, other: int, outgoing: Sequence[Tensor], incoming: Sequence[Form]) -> Exchange:
        return self._start(other, [tensor.detach().contiguous() for tensor in outgoing], incoming, self._device)

    def exchange_on_host(self, other: int, outgoing: Sequence[Tensor], incoming: Sequence[Form]) -> Exchange:
        return self._start(other, outgoing, incoming, torch.device("cpu"))

    def _start(self, other: int, sent: Sequence[Tensor], incoming: Sequence[Form], device: torch.device) -> Exchange:
        group = self._group.process_group
        received = [torch.empty(form.shape, dtype=form.dtype, device=device) for form in incoming]
        operations = [dist.P2POp(dist.isend, tensor, group=group, group_peer=other) for tensor in sent]
        operations += [dist.P2POp(dist.irecv, tensor, group=group, group_peer=other) for tensor in received]
        works = dist.batch_isend_irecv(operations) if operations else []
        if len(works) < len(operations):  # one for all
            return Exchange(works, sent, works, received)
        return Exchange(works[: len(sent)], sent, works[len(sent) :], received)
