"""CPU, CUDA, and any other device that executes operations eagerly (`torch.accelerator`)."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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

    def numbers(self, values: Sequence[float]) -> Tensor:
        if self.host_memory:
            return torch.tensor(values, dtype=torch.float32, device=self.device)
        if len(set(values)) == 1:  # an operation, where a copy might wait
            return torch.full((len(values),), values[0], dtype=torch.float32, device=self.device)
        on_host = torch.tensor(values, dtype=torch.float32, device="cpu")
        return self.place(on_host.pin_memory() if can_pin(self.device) else on_host)

    def write(self, target: Tensor, value: Tensor) -> None:
        with torch.inference_mode(target.is_inference()), torch.no_grad():
            target.copy_(value)

    def version(self, tensor: Tensor) -> object:
        return tensor.untyped_storage()._cdata, tensor._version

    def to_host(self, tensors: Sequence[Tensor], *, copy: bool = True) -> list[Tensor]:
        return [tensor.detach().to("cpu", copy=copy) for tensor in tensors]

    def step_boundary(self, *, wait: bool = False) -> None:
        if wait and not self.host_memory:
            torch.accelerator.synchronize(self.device)

    def seed(self, value: int) -> None:
        # torch.manual_seed also takes a stack trace for each kind of accelerator that is not there: 0.5 ms.
        torch.default_generator.manual_seed(value)
        if not self.host_memory:
            module = torch.get_device_module(self.device)
            getattr(module, "manual_seed_all", getattr(module, "manual_seed", torch.manual_seed))(value)

    def current_seed(self) -> int:
        return torch.initial_seed() % 2**63

    def generator_state(self) -> Tensor:
        on_host = torch.get_rng_state()
        if self.host_memory:
            return on_host
        on_device: Tensor = torch.get_device_module(self.device).get_rng_state(self.device)
        return torch.cat([on_host, on_device])  # a model may draw on either, and a device without an operation does

    def set_generator_state(self, state: Tensor) -> None:
        on_host, on_device = map(torch.clone, state.tensor_split([len(torch.get_rng_state())]))  # torch takes no views
        torch.set_rng_state(on_host)
        if not self.host_memory:
            torch.get_device_module(self.device).set_rng_state(on_device, self.device)

    def counters(self) -> GraphCounters | None:
        requested = self.requested_graphs()
        return GraphCounters(requested, None) if requested else None

    def requested_graphs(self) -> int | None:
        return _dynamo_counters("stats").get("unique_graphs") or None

    def compile_seconds(self) -> float:
        spent = getattr(sys.modules.get("torch._dynamo.utils"), "cumulative_time_spent_ns", {})
        return (spent.get("entire_frame_compile", 0) + spent.get("entire_backward_compile", 0)) / 1e9

    def cache_counters(self) -> CacheCounters | None:
        found = _dynamo_counters("aot_autograd")
        hits, missed, bypassed = (found.get(f"autograd_cache_{name}", 0) for name in ("hit", "miss", "bypass"))
        return CacheCounters(hits, missed + bypassed) if hits + missed + bypassed else None

    def transfers_to_host(self, *, own: bool = True) -> int | None:
        return None

    def memory(self) -> DeviceMemory | None:
        if self.host_memory:
            return None
        try:
            used = torch.accelerator.memory_allocated(self.device)
            peak = torch.accelerator.max_memory_allocated(self.device)
        except RuntimeError:  # an accelerator without memory statistics
            return None
        return DeviceMemory(used, peak, _memory_of(self.device))


def _dynamo_counters(group: str) -> Mapping[str, int]:
    """What torch.compile has counted in this process; empty where nothing has used it, whose import takes seconds."""
    loaded = sys.modules.get("torch._dynamo.utils")
    return {} if loaded is None else loaded.counters[group]


@functools.cache
def _memory_of(device: torch.device) -> int | None:
    """Bytes of the device's memory; None where its module does not say."""
    module = torch.get_device_module(device)
    if hasattr(module, "get_device_properties"):
        return getattr(module.get_device_properties(device), "total_memory", None)
    return module.mem_get_info(device)[1] if hasattr(module, "mem_get_info") else None


@contextmanager
def kept_generators() -> Iterator[None]:
    """Inside the block, code may draw on host and accelerator; afterwards the generators are where they were."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    here, kind = ([], "cuda") if accelerator is None else ([torch.accelerator.current_device_index()], accelerator.type)
    with torch.random.fork_rng(devices=here, device_type=kind):
        yield


@functools.cache
def computes_in(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a native device multiplies matrices of this type, also under autocast: tried on one element."""
    if not torch.amp.is_autocast_available(device.type):
        return False
    named = getattr(torch.get_device_module(device), "get_amp_supported_dtype", None)
    with suppress(RuntimeError):
        one = torch.ones(1, 1, dtype=dtype, device=device)
        return (named is None or dtype in named()) and float(one @ one) == 1.0
    return False


@functools.cache
def can_pin(device: torch.device) -> bool:
    """Whether host memory can be page-locked for this device, so that copies to and from it need not wait: tried."""
    if device.type in ("cpu", "xla", "mps"):  # mps: its memory is the host's, and pinning gives a tensor on it
        return False
    with suppress(RuntimeError):
        return torch.empty(1, dtype=torch.uint8, device="cpu", pin_memory=True).is_pinned()
    return False


@functools.cache
def has_fused_kernel(kind: type[torch.optim.Optimizer], device: torch.device) -> bool:
    """Whether an optimizer of torch's works with `fused=True` on this device: tried on one element."""
    if device.type in ("cpu", "xla"):
        return device.type == "cpu"
    parameter = torch.ones(1, device=device, requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    with suppress(RuntimeError):
        kind([parameter], lr=0.1, fused=True).step()  # type: ignore[call-arg]
        return float(parameter) < 1
    return False
