"""Bringing a module to its device, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from stepmark.runtime.base import Runtime
from stepmark.runtime.host_group import HostGroup


def place_module(module: nn.Module, runtime: Runtime) -> None:
    """Moves parameters and buffers to the device. Every Parameter stays the object it is, so that ties and the
    optimizers that hold it stay right (`module.to` would make new ones on a lazy device)."""
    for tensor in _tensors(module):
        if tensor.device == runtime.device:
            continue
        placed = runtime.place(tensor.detach())
        if isinstance(tensor, nn.Parameter):
            placed = nn.Parameter(placed, requires_grad=tensor.requires_grad)
            placed.__dict__.update(tensor.__dict__)  # what is known of it: its layout, its copies
        torch.utils.swap_tensors(tensor, placed)


def agree_on_weights(module: nn.Module, runtime: Runtime, host: HostGroup, kinds: int = 1) -> bool:
    """Makes the module equal on all ranks: where digests differ, the lowest rank's values are taken. Collective.

    `kinds` different modules are compared each with its like: those of ranks that are equal modulo `kinds`, as the
    ranks of a tensor parallel group hold different parts. Returns whether any differed.
    """
    if host.size == kinds:
        return False
    digests = host.all_gather([_digest(value) for value in _on_host(module, runtime)])
    if any(len(each) != len(digests[0]) for each in digests):
        raise ValueError("the ranks built models of different structure")
    different = [
        index
        for index, each in enumerate(zip(*digests, strict=True))
        if any(len(set(each[kind::kinds])) > 1 for kind in range(kinds))
    ]
    tensors = list(_tensors(module))
    for index in different:
        for kind in range(kinds):
            own = runtime.to_host([tensors[index]])[0] if host.rank == kind else None
            value = host.broadcast(own, source=kind)
            if host.rank % kinds == kind:
                _take(tensors[index], value, runtime)
    return bool(different)


def _on_host(module: nn.Module, runtime: Runtime) -> Iterator[Tensor]:
    """One after the other, so that a model on a device is not held on the host whole."""
    for tensor in _tensors(module):
        yield tensor.detach() if tensor.device.type == "cpu" else runtime.to_host([tensor])[0]


def _take(tensor: Tensor, value: Tensor, runtime: Runtime) -> None:
    if tensor.device.type == "cpu":
        with torch.no_grad():
            tensor.copy_(value)
    else:
        runtime.write(tensor, value)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _digest(tensor: Tensor) -> str:
    flat: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{tuple(tensor.shape)} {tensor.dtype} {xxhash.xxh3_128_hexdigest(flat)}"
