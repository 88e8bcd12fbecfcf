"""Moves a module to its device, and makes weights equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from stepmark.errors import UsageError
from stepmark.liveness.host_group import HostGroup
from stepmark.runtime.base import Runtime
from stepmark.runtime.device import runtime_for
from stepmark.sharding.views import flat_bytes, host_array


def place_module(module: nn.Module, runtime: Runtime) -> None:
    """Moves parameters and buffers to the device.

    Every Parameter stays the same object, so that ties and optimizers remain valid; `module.to` would create new ones
    on a lazy device.
    """
    fetch_module(module, runtime)
    for tensor in _tensors(module):
        if tensor.device != runtime.device and runtime.device.type != "cpu":
            replace(tensor, runtime.place(tensor.detach()))


def cast_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Converts floating point parameters and buffers in place, but for the frequencies of rotary embeddings.

    Those are buffers that are not saved, with `freq` in their name. They keep their type, as in `from_pretrained`:
    rounded to bfloat16 they turn a position of two thousand by a third of a radian. `module.to` converts them too.
    """
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        for name, buffer in part._buffers.items():
            frequencies = name in part._non_persistent_buffers_set and "freq" in name
            if buffer is not None and buffer.is_floating_point() and not frequencies:
                part._buffers[name] = buffer.to(dtype)


def fetch_module(module: nn.Module, runtime: Runtime) -> None:
    """Moves tensors to the host that are on a device of another type than the runtime's, such as a model that was on
    `xla` and is trained on the CPU. Every Parameter stays the same object."""
    settled = ("cpu", "meta", runtime.device.type)  # those on `meta` have no values
    elsewhere = [tensor for tensor in _tensors(module) if tensor.device.type not in settled]
    for device in {tensor.device for tensor in elsewhere}:
        runtime_for(device).step_boundary(wait=True)  # otherwise each pending tensor is computed by a graph of its own
    for tensor in elsewhere:
        replace(tensor, runtime_for(tensor.device).to_host([tensor])[0])


def replace(tensor: Tensor, value: Tensor) -> None:
    """Gives a tensor object another value, device and dtype; it stays a Parameter if it is one, and its attributes,
    such as its layout, stay. Raises UsageError if a reference from C++ prevents that."""
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    value.__dict__.update(tensor.__dict__)
    try:
        torch.utils.swap_tensors(tensor, value)
    except RuntimeError as error:  # its memory cannot be exchanged under a reference from C++
        raise UsageError(
            f"model: its parameters cannot be moved to another device, because something else still refers to them, "
            f"such as DistributedDataParallel around the model; pass a model that was not wrapped ({error})"
        ) from error


def agree_on_weights(module: nn.Module, runtime: Runtime, host: HostGroup) -> bool:
    """Makes a module, on the host or on the device, equal on all ranks (`host`), and returns whether any tensor
    differed; see `agree_on_tensors`. Collective."""
    return agree_on_tensors(list(_tensors(module)), [range(host.size)], runtime, host)


def agree_on_tensors(
    tensors: Sequence[Tensor], groups: Sequence[Sequence[int]], runtime: Runtime, host: HostGroup
) -> bool:
    """Makes tensors equal on the ranks of each group: where they differ, those of its first rank are used. Returns
    whether any differed. Collective over `host`, all ranks.

    `tensors`: those that this rank holds, in the same order on all ranks of its group; empty where it is in none.
    `groups`: ranks that hold the same ones, such as the two ends of a pipeline with tied embeddings.
    """
    if all(len(group) == 1 for group in groups):
        return False
    # One at a time, so that the host never holds a complete model.
    on_host = (each.detach() if each.device.type == "cpu" else runtime.to_host([each])[0] for each in tensors)
    checksums, differ = host.all_gather([checksum(each) for each in on_host]), False
    for group in groups:
        held = [checksums[rank] for rank in group]
        if any(len(each) != len(held[0]) for each in held):
            raise ValueError("the ranks built models of different structure")
        for index in (index for index, found in enumerate(zip(*held, strict=True)) if len(set(found)) > 1):
            differ = True
            data = flat_bytes(runtime.to_host([tensors[index]])[0]).numpy() if host.rank == group[0] else None
            value = torch.from_numpy(host.broadcast(data, source=group[0])).view(tensors[index].dtype)
            if host.rank in group:
                where = runtime_for(tensors[index].device) if tensors[index].device.type == "cpu" else runtime
                where.write(tensors[index], value.view(tensors[index].shape))
    return differ


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def checksum(tensor: Tensor) -> str:
    flat: Any = host_array(flat_bytes(tensor))
    return f"{tuple(tensor.shape)} {tensor.dtype} {xxhash.xxh3_128_hexdigest(flat)}"
