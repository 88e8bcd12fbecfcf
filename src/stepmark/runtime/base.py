"""What the rest of Stepmark may ask of a device.

A runtime is all that differs between a lazy device (PyTorch/XLA) and an eager one (CPU, CUDA, any
`torch.accelerator`). Everything else is written once, against this protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class GraphCounters:
    """Graphs compiled and executed by this process so far; what a lazy device does, counted after a drain."""

    compilations: int
    executions: int


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of the device's memory: in use by this process now, the most that were, and how many there are (None where
    the device does not say)."""

    used: int
    peak: int | None
    limit: int | None


class Runtime(Protocol):
    """One device of one rank.

    `lazy` says that operations are recorded and run at a step boundary, in fixed shapes if they are not to be
    compiled again. `host_memory` says that the device's memory is the host's.
    """

    name: str
    device: torch.device
    lazy: bool
    host_memory: bool

    def place(self, batch: Any) -> Any:
        """The same nest of dicts, lists and tuples with every tensor on the device. May be called from a background
        thread; starts no graph."""

    def write(self, target: Tensor, value: Tensor) -> None:
        """Gives `target`, on the device, the values of `value`, on the host, of the same shape and dtype. The tensor
        object stays the same, and on a lazy device nothing is compiled."""

    def to_host(self, tensors: Sequence[Tensor], *, copy: bool = True) -> list[Tensor]:
        """Host copies of whole tensors, in their own dtypes. Waits for the device; call `step_boundary` first where
        pending operations are to be included. Compiles nothing. Without `copy`, and where the device's memory is the
        host's, views of it: to be read before the device runs anything more."""

    def step_boundary(self, *, wait: bool = False) -> None:
        """Runs what is pending as one graph (nothing on an eager device). With `wait`, returns when it is done."""

    def seed(self, value: int) -> None:
        """Sets the generator that the device's random operations draw from (dropout). `value` is in [0, 2**63)."""

    def current_seed(self) -> int:
        """The seed in force, on the host: what `seed` set, where nothing was drawn since."""

    def counters(self) -> GraphCounters | None:
        """Graphs so far, None on an eager device. Drains the device first."""

    def compilations(self) -> int | None:
        """Graphs compiled so far, None on an eager device. Waits for nothing: compiling is done by the thread that asks
        for a step."""

    def transfers_to_host(self) -> int | None:
        """Transfers from the device to the host so far, by all threads of this process; None on an eager device. Waits
        for nothing."""

    def memory(self) -> DeviceMemory | None:
        """The device's memory as its allocator counts it, None where it does not, or where it is the host's. Waits for
        nothing."""
