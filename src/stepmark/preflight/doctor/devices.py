"""The devices of this machine and their drivers."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from stepmark.errors import StepmarkError
from stepmark.preflight.doctor.findings import Finding, Status
from stepmark.runtime.device import choose_device
from stepmark.runtime.hardware import neuron_device_present, tpu_present
from stepmark.runtime.versions import installed_version

TOPIC = "devices"
NEURON_DRIVER = Path("/sys/module/neuron/version")
# A Neuron device needs all packages of one of these: a native device, or a lazy one.
NEURON_PACKAGES = (("torch-neuronx", "neuronx-cc"), ("torch_xla", "libneuronxla", "neuronx-cc"))
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def look_at_devices(wish: str) -> Iterator[Finding]:
    """`wish`: the recipe's `device`."""
    cores = os.cpu_count() or 1
    yield Finding(TOPIC, "CPU", f"{cores} cores", values={"cores": cores})
    yield from _neuron(wish)
    yield from _cuda()
    if tpu_present():
        yield Finding(TOPIC, "TPU", f"{len(glob.glob('/dev/accel[0-9]*'))} devices")
    try:
        chosen = choose_device(wish)
    except StepmarkError as error:
        yield Finding(TOPIC, f"device: {wish}", str(error), Status.FAILURE)
        return
    yield Finding(TOPIC, f"device: {wish}", f"trains on {chosen}", values={"device": chosen})
    if chosen == "xla" and neuron_device_present() and os.environ.get("PJRT_DEVICE", "NEURON") != "NEURON":
        text = f"{os.environ['PJRT_DEVICE']} on a machine with Neuron devices; unset it to train on them"
        yield Finding(TOPIC, "PJRT_DEVICE", text, Status.WARNING)


def _neuron(wish: str) -> Iterator[Finding]:
    devices = glob.glob("/dev/neuron[0-9]*")
    if not devices:
        return
    driver = neuron_driver()
    yield Finding(TOPIC, "Neuron", f"{len(devices)} devices, driver {driver or 'unknown'}")
    blocked = [device for device in devices if not os.access(device, os.R_OK | os.W_OK)]
    if blocked:
        text = f"{blocked[0]} cannot be opened by this user; add it to the device's group"
        yield Finding(TOPIC, "Neuron", text, Status.FAILURE)
    missing = [[name for name in names if installed_version(name) is None] for names in NEURON_PACKAGES]
    if all(missing):
        lacks = " or ".join(map(" and ".join, missing))
        text = f"nothing trains on its devices: {lacks} not installed; install AWS's packages (docs/trainium.md)"
        yield Finding(TOPIC, "Neuron", text, Status.WARNING if wish == "cpu" else Status.FAILURE)


def neuron_driver() -> str | None:
    """The version of the loaded kernel module."""
    return NEURON_DRIVER.read_text().strip() if NEURON_DRIVER.is_file() else None


def _cuda() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        if NVIDIA_DRIVER.is_file():
            text = f"the driver is loaded, but torch {torch.__version__} cannot use it; install a torch for CUDA"
            yield Finding(TOPIC, "CUDA", text, Status.WARNING)
        return
    found = (
        re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", NVIDIA_DRIVER.read_text()) if NVIDIA_DRIVER.is_file() else None
    )
    driver = found[1] if found else "unknown"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        text = f"{properties.name}, {properties.total_memory / 1e9:.1f} GB; CUDA {torch.version.cuda}, driver {driver}"
        yield Finding(TOPIC, f"CUDA {index}", text, values={"memory": properties.total_memory})
