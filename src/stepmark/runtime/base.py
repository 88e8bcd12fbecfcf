"""The interface to a device.

A runtime contains everything that differs between a lazy device (PyTorch/XLA) and an eager one (CPU, CUDA, any
`torch.accelerator`). All other code is written once, against this protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class GraphCounters:
    """Graphs that a lazy device, or torch.compile, has compiled in this process, and that the first has executed."""

    compilations: int
    executions: int | None


@dataclass(frozen=True)
class CacheCounters:
    """Graphs of this process that were read from the compile cache, and that were not in it or could not be read."""

    hits: int
    misses: int


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of the device's memory: in use by this process now, at the peak, and in total (None where unknown)."""

    used: int
    peak: int | None
    limit: int | None


class Runtime(Protocol):
    """One device of one rank."""

    name: str  # the device type, such as "cpu" or "xla"
    device: torch.device
    lazy: bool  # whether operations are recorded, and compiled and run at a step boundary; new shapes compile again
    host_memory: bool  # whether the device's memory is the host's

    def place(self, batch: Any) -> Any:
        """Copies every tensor in a nest of dicts, lists and tuples to the device, in any thread; runs no graph."""

    def numbers(self, values: Sequence[float]) -> Tensor:
        """A float32 vector of these values on the device, without waiting; on a lazy one as data, not constants."""

    def write(self, target: Tensor, value: Tensor) -> None:
        """Copies `value`, on the host, to `target`, on the device, of the same shape and dtype. The tensor object stays
        the same, and a lazy device compiles nothing."""

    def version(self, tensor: Tensor) -> object:
        """A value that changes whenever the tensor is written, or gets other memory; not for writes in place through
        `tensor.data` on an eager device."""

    def to_host(self, tensors: Sequence[Tensor], *, copy: bool = True) -> list[Tensor]:
        """Copies tensors to the host, in their own dtypes. Waits for the device; call `step_boundary` first to include
        pending operations. Compiles nothing. Without `copy`, and where the device's memory is the host's, may return
        views of it, which are valid until the device runs anything else."""

    def step_boundary(self, *, wait: bool = False) -> None:
        """Runs pending operations as one graph; no-op on an eager device. With `wait`, returns once they are done."""

    def seed(self, value: int) -> None:
        """Seeds the generator of the device's random operations (dropout). `value` is in [0, 2**63)."""

    def current_seed(self) -> int:
        """The seed that `seed` has set, as long as no random number was drawn since."""

    def generator_state(self) -> Tensor:
        """The state of the generator of the device's random operations, on the host; int64 numbers or bytes. On an
        eager device also that of the host's generator. Waits for nothing."""

    def set_generator_state(self, state: Tensor) -> None:
        """Restores a state that `generator_state` returned on this rank or another one."""

    def counters(self) -> GraphCounters | None:
        """Graphs compiled and executed so far. On an eager device those of torch.compile, None without any; on a lazy
        one waits for the device first."""

    def requested_graphs(self) -> int | None:
        """Graphs that were new to this process so far, whether compiled or read from the compile cache; on an eager
        device those of torch.compile, None without any. Does not wait for the device: graphs are compiled by the thread
        that ends a step, or calls the model."""

    def compile_seconds(self) -> float:
        """Seconds in which this process has compiled graphs so far. Does not wait for the device."""

    def cache_counters(self) -> CacheCounters | None:
        """Graphs looked up in the compile cache so far; None where that is not seen. Does not wait for the device."""

    def transfers_to_host(self, *, own: bool = True) -> int | None:
        """Transfers from the device to the host so far, by all threads of this process; None on an eager device.
        Without `own`, those that `to_host` has made are left out. Waits for nothing."""

    def memory(self) -> DeviceMemory | None:
        """Memory use as the device's allocator counts it; None where none does. Does not wait for the device."""


def has_addresses(device: torch.device) -> bool:
    """Whether tensors on the device have addresses, by which those that share memory are found."""
    return device.type not in ("meta", "mps", "xla")  # mps: an address is that of an object, not of memory


def map_tensors(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """Applies `function` to every tensor of a nest; other leaves are unchanged."""
    if isinstance(tree, Tensor):
        return function(tree)
    if hasattr(tree, "items"):
        return {key: map_tensors(value, function) for key, value in tree.items()}
    if isinstance(tree, list):
        return [map_tensors(value, function) for value in tree]
    if isinstance(tree, tuple):
        values = [map_tensors(value, function) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    return tree
