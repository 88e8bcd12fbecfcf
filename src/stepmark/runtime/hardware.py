"""What this machine has, told without starting any of it."""

from __future__ import annotations

import glob
import importlib.util
import os


def torch_xla_installed() -> bool:
    return importlib.util.find_spec("torch_xla") is not None


def neuron_device_present() -> bool:
    """A Trainium or Inferentia device; its driver makes /dev/neuron0, /dev/neuron1, …"""
    return bool(glob.glob("/dev/neuron[0-9]*"))


def tpu_present() -> bool:
    """A TPU: its driver makes /dev/accel0, … or, with VFIO, Google's runtime says so in the environment."""
    return bool(glob.glob("/dev/accel[0-9]*")) or "TPU_WORKER_ID" in os.environ


def host_memory() -> tuple[int, int] | None:
    """Bytes of this process that are in memory now, and the most that were; None where the system does not say."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return 1024 * int(lines["VmRSS"].split()[0]), 1024 * int(lines["VmHWM"].split()[0])
    except (OSError, KeyError, ValueError):
        return None
