"""Chooses a run's device, from the field `device` and what the machine has."""

from __future__ import annotations

import functools

import torch

from stepmark.errors import DeviceError
from stepmark.launch.threads import usable_cores
from stepmark.runtime.base import Runtime
from stepmark.runtime.eager import EagerRuntime
from stepmark.runtime.hardware import check_device_name, neuron_device_present, torch_xla_installed, tpu_present
from stepmark.runtime.xla_environment import check_no_type_override

LAZY = ("neuron", "tpu")  # which torch_xla opens as well


def choose_device(wish: str = "auto") -> str:
    """The device type that `wish` means on this machine: one of `DEVICES`, or another that torch.accelerator reports.

    `auto`: XLA if torch_xla is installed and there is a Neuron device or a TPU, otherwise torch's accelerator,
    otherwise the CPU. `PJRT_DEVICE` is ignored: transformers sets it on import wherever torch_xla is installed.

    Raises UsageError for an unknown name and DeviceError for a device that is missing.
    """
    check_device_name(wish)
    device = _default_device() if wish == "auto" else wish
    _check_available(device)
    if device == "xla":
        check_no_type_override()
    return device


def _default_device() -> str:
    return "xla" if torch_xla_installed() and (neuron_device_present() or tpu_present()) else _native() or "cpu"


def _native() -> str | None:
    """The type of torch's accelerator; None where there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else accelerator.type


def _check_available(device: str) -> None:
    if device == "xla" and not torch_xla_installed():
        raise DeviceError("device: xla needs torch_xla, which is not installed; pip install 'stepmark[xla]'")
    if device not in ("xla", "cpu") and (found := _native()) != device:
        others = "with torch_xla choose device: xla" if device in LAZY else f"choose device: {found or 'cpu'} or auto"
        has = "" if found is None else f", but {found}"
        raise DeviceError(f"device: {device} is not available: torch has no native {device} device here{has}; {others}")


def print_count(wish: str) -> None:
    """Prints the device type that `wish` means, and how many ranks can have one: of a CPU, XLA's too, one a core."""
    device, count = choose_device(wish), torch.accelerator.device_count()
    if device == "xla":
        from stepmark.runtime.xla import XlaRuntime, addressable_devices

        device, count = ("cpu", 0) if XlaRuntime().host_memory else (device, addressable_devices())
    print(device, usable_cores() if device == "cpu" else count)


def create_runtime(device: str, local_rank: int = 0, local_size: int = 1) -> Runtime:
    """The runtime of device type `device` for one of this machine's `local_size` ranks. Raises DeviceError."""
    if device == "xla":
        from stepmark.runtime.xla import XlaRuntime

        return XlaRuntime(local_rank, local_size)
    if device == "cpu":
        return EagerRuntime(torch.device("cpu"))
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise DeviceError(
            f"local rank {local_rank} has no {device} device: this machine has {count}; start one rank per device"
        )
    torch.accelerator.set_device_index(local_rank)
    return EagerRuntime(torch.device(device, local_rank))


@functools.cache
def runtime_for(device: torch.device) -> Runtime:
    """The runtime for tensors on `device`, outside of a run."""
    if device.type == "xla":
        from stepmark.runtime.xla import XlaRuntime

        return XlaRuntime()
    return EagerRuntime(device)
