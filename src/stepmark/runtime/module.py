"""Bringing a module to its device, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from stepmark.runtime.base import Runtime
from stepmark.runtime.host import HostGroup


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


def agree_on_weights(module: nn.Module, host: HostGroup) -> bool:
    """Makes the module, still on the host, equal on all ranks: where digests differ, rank 0's values are taken.

    Returns whether they differed.
    """
    if host.size == 1:
        return False
    digests = host.all_gather([_digest(tensor) for tensor in _tensors(module)])
    if any(len(each) != len(digests[0]) for each in digests):
        raise ValueError("the ranks built models of different structure")
    different = [index for index, each in enumerate(zip(*digests, strict=True)) if len(set(each)) > 1]
    for index, tensor in enumerate(_tensors(module)):
        if index in different:
            value = host.broadcast(tensor.detach().contiguous() if host.rank == 0 else None)
            with torch.no_grad():
                tensor.copy_(value)
    return bool(different)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _digest(tensor: Tensor) -> str:
    flat: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{tuple(tensor.shape)} {tensor.dtype} {xxhash.xxh3_128_hexdigest(flat)}"
