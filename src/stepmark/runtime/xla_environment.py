"""Environment variables of torch_xla and torch_neuronx: which device they open, and what values it computes."""

from __future__ import annotations

import logging
import os

from stepmark.errors import DeviceError
from stepmark.runtime.hardware import neuron_device_present, tpu_present

logger = logging.getLogger("stepmark")

XLA_FOLDER = "XLA_PERSISTENT_CACHE_PATH"  # of torch_xla's compiled graphs, read when it first looks one up

BF16_OVERRIDES = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16")
BF16_REMEDY = "unset it, and train in bfloat16 with dtype: bfloat16 or bf16: true"
TYPE_OVERRIDES = {**dict.fromkeys(BF16_OVERRIDES, BF16_REMEDY), "XLA_USE_32BIT_LONG": "unset it"}
_EXTRACTION = "NEURON_EXTRACT_GRAPHS_ONLY"
_OFF = ("", "0", "false")
_warned = False


def prepare_environment() -> None:
    """Sets the environment variables that torch_xla and Neuron's compiler read when they are first imported.

    By default Neuron's compiler casts fp32 matrix products to bf16; here fp32 stays fp32. What the user set is kept,
    also a `PJRT_DEVICE` that is not the machine's accelerator.
    """
    present = "NEURON" if neuron_device_present() else "TPU" if tpu_present() else "CPU"
    os.environ.setdefault("PJRT_DEVICE", present)
    flags = os.environ.get("NEURON_CC_FLAGS", "")
    if present == "NEURON" and "--auto-cast" not in flags:
        os.environ["NEURON_CC_FLAGS"] = f"{flags} --auto-cast=none".strip()


def warn_of_unused_accelerator() -> None:
    """Logs that the user's `PJRT_DEVICE=CPU` leaves the machine's accelerator unused."""
    if os.environ.get("PJRT_DEVICE") == "CPU" and (neuron_device_present() or tpu_present()):
        logger.warning("PJRT_DEVICE=CPU is set: XLA runs on the CPU, and this machine's accelerator is not used")


def check_no_type_override() -> None:
    """Raises DeviceError where a variable is set that makes torch_xla store float32 as bfloat16, or int64 as int32:
    parameters, optimizer states and restored checkpoints would be rounded without any sign of it."""
    for name, remedy in TYPE_OVERRIDES.items():
        if is_on(name):
            raise DeviceError(
                f"device: xla: the environment variable {name}={os.environ[name]} makes torch_xla store tensors in a "
                f"narrower type than their dtype; {remedy}"
            )


def extracting_graphs() -> bool:
    """Whether this process runs only to have its graphs compiled, as under AWS's `neuron_parallel_compile`.

    The device then runs nothing and returns placeholder values, so nothing that the process computes may be saved, and
    no file of a real run may be replaced or deleted.
    """
    return is_on(_EXTRACTION)


def warn_not_saved(what: str) -> None:
    """Logs once per process that `what`, such as "checkpoint-10", and whatever comes after it is not saved."""
    global _warned
    if not _warned:
        logger.warning("%s is not saved: under %s values are placeholders", what, _EXTRACTION)
    _warned = True


def is_on(name: str) -> bool:
    """Whether a variable is set to anything but 0, false or nothing."""
    return os.environ.get(name, "").lower() not in _OFF
