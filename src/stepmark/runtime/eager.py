"""CPU, CUDA, and any other device that executes operations eagerly (`torch.accelerator`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stepmark.runtime.base import CacheCounters, DeviceMemory, GraphCounters, map_tensors


class EagerRuntime:
    """See `Runtime`. An accelerator queues operations in streams, which a step boundary does not wait for."""

    lazy = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = device.type
        self.host_memory = device.type == "cpu"

    def place(self, batch: Any) -> Any:
        if self.host_memory:
            return batch
        return map_tensors(batch, lambda tensor: tensor.to(self.device, non_blocking=tensor.is_pinned()))

    def write(self, target: Tensor, value: Tensor) -> None:
        with torch.inference_mode(target.is_inference()), torch.no_grad():
            target.copy_(value)

    def version(self, tensor: Tensor) -> object:
        return tensor._version

    def to_host(self, tensors: Sequence[Tensor], *, copy: bool = True) -> list[Tensor]:
        return [tensor.detach().to("cpu", copy=copy) for tensor in tensors]

    def step_boundary(self, *, wait: bool = False) -> None:
        if wait and not self.host_memory:
            torch.accelerator.synchronize(self.device)

    def seed(self, value: int) -> None:
        if self.host_memory:  # the other takes a stack trace for an accelerator that it may never use: 0.5 ms
            torch.default_generator.manual_seed(value)
        else:
            torch.manual_seed(value)

    def current_seed(self) -> int:
        return torch.initial_seed() % 2**63

    def generator_state(self) -> Tensor:
        if self.host_memory:
            return torch.get_rng_state()
        state: Tensor = torch.get_device_module(self.device).get_rng_state(self.device)
        return state

    def drew_since(self, state: Tensor) -> bool:
        return not torch.equal(state, self.generator_state())

    def set_generator_state(self, state: Tensor) -> None:
        if self.host_memory:
            torch.set_rng_state(state)
        else:
            torch.get_device_module(self.device).set_rng_state(state, self.device)

    def counters(self) -> GraphCounters | None:
        return None

    def requested_graphs(self) -> int | None:
        return None

    def cache_counters(self) -> CacheCounters | None:
        return None

    def transfers_to_host(self, *, own: bool = True) -> int | None:
        return None

    def memory(self) -> DeviceMemory | None:
        if self.host_memory:
            return None
        try:
            used = torch.accelerator.memory_allocated(self.device)
            peak = torch.accelerator.max_memory_allocated(self.device)
        except (RuntimeError, NotImplementedError):  # an accelerator without memory statistics
            return None
        limit = torch.cuda.get_device_properties(self.device).total_memory if self.device.type == "cuda" else None
        return DeviceMemory(used, peak, limit)
