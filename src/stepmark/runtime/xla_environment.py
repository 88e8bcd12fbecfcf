"""Environment variables of torch_xla and torch_neuronx that change what values a lazy device computes."""

from __future__ import annotations

import logging
import os

from stepmark.errors import DeviceError

logger = logging.getLogger("stepmark")

_TYPE_OVERRIDES = {
    "XLA_USE_BF16": "unset it, and train in bfloat16 with dtype: bfloat16 or bf16: true",
    "XLA_DOWNCAST_BF16": "unset it, and train in bfloat16 with dtype: bfloat16 or bf16: true",
    "XLA_USE_32BIT_LONG": "unset it",
}
_EXTRACTION = "NEURON_EXTRACT_GRAPHS_ONLY"
_OFF = ("", "0", "false")
_warned = False


def check_no_type_override() -> None:
    """Checks that tensors on the lazy device have the dtype that they report.

    Raises:
        DeviceError: A variable is set that makes torch_xla store float32 as bfloat16, or int64 as int32: parameters,
            optimizer states and restored checkpoints would be rounded without any sign of it.
    """
    for name, remedy in _TYPE_OVERRIDES.items():
        if _is_on(name):
            raise DeviceError(
                f"device: xla: the environment variable {name}={os.environ[name]} makes torch_xla store tensors in a "
                f"narrower type than their dtype; {remedy}"
            )


def extracting_graphs() -> bool:
    """Whether this process runs only to have its graphs compiled, as under AWS's `neuron_parallel_compile`.

    The device then runs nothing and returns placeholder values, so nothing that the process computes may be saved, and
    no file of a real run may be replaced or deleted.
    """
    return _is_on(_EXTRACTION)


def warn_not_saved(what: str) -> None:
    """Logs once per process that `what`, such as "checkpoint-10", and whatever comes after it is not saved."""
    global _warned
    if not _warned:
        logger.warning("%s is not saved: under %s values are placeholders", what, _EXTRACTION)
    _warned = True


def _is_on(name: str) -> bool:
    return os.environ.get(name, "").lower() not in _OFF
