"""The devices that `device` may name, and which of them this machine has, without starting any."""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import os
import subprocess
import sys

from stepmark.config.fields import described_at
from stepmark.config.training_fields import DEVICES
from stepmark.errors import UsageError
from stepmark.launch.threads import usable_cores

_COUNT = "import signal, sys; signal.alarm(120); from stepmark.runtime import device; device.print_count(sys.argv[1])"


def torch_xla_installed() -> bool:
    return importlib.util.find_spec("torch_xla") is not None


def neuron_device_present() -> bool:
    """Whether there is a Trainium or Inferentia device: its driver creates /dev/neuron0, /dev/neuron1, …"""
    return bool(glob.glob("/dev/neuron[0-9]*"))


def tpu_present() -> bool:
    """Whether there is a TPU: its driver creates /dev/accel0, …; with VFIO, Google's runtime sets TPU_WORKER_ID."""
    return bool(glob.glob("/dev/accel[0-9]*")) or "TPU_WORKER_ID" in os.environ


def count_devices(name: str) -> tuple[str, int]:
    """See `stepmark.runtime.device.print_count`: in a process of its own, as a supervisor opens none. Missing devices,
    and those whose driver hangs, are none."""
    if name == "cpu":
        return name, usable_cores()
    command = [sys.executable, "-P", "-c", _COUNT, name]
    told = subprocess.run(command, capture_output=True, text=True, start_new_session=True).stdout
    kind, number = told.split()[-2:] or (name, "0")
    return kind, int(number)


def host_memory() -> tuple[int, int] | None:
    """Resident bytes of this process, now and at the peak; None where the system does not report them."""
    return _kibibytes("/proc/self/status", "VmRSS", "VmHWM")


def machine_memory() -> tuple[int, int] | None:
    """Bytes of this machine's memory, and of it what is available; None where the system does not report them."""
    return _kibibytes("/proc/meminfo", "MemTotal", "MemAvailable")


def _kibibytes(path: str, one: str, other: str) -> tuple[int, int] | None:
    """Two values of a file, which has them in KiB, in bytes."""
    try:
        with open(path, encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return 1024 * int(lines[one].split()[0]), 1024 * int(lines[other].split()[0])
    except (OSError, KeyError, ValueError):
        return None


def check_device_name(wish: str) -> None:
    """Raises UsageError for an unknown name: one that is not well known, and not a type of devices of torch's. Names
    that are not well known load torch, with the backends of devices that are installed."""
    if wish in DEVICES:
        return
    hint = ""
    if wish.startswith(("gpu", "cuda:")):
        hint = "; for GPUs use cuda: each rank takes one of those that CUDA_VISIBLE_DEVICES lists"
    else:
        import torch

        with contextlib.suppress(RuntimeError):
            if torch.device(wish).type == wish:
                return
    hint += described_at("device")
    raise UsageError(f"device: {wish!r} is unknown; choose one of {', '.join(DEVICES)}{hint}")
