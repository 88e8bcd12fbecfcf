"""The names that the field `device` accepts."""

from __future__ import annotations

from stepmark.errors import UsageError

DEVICES = ("auto", "xla", "cuda", "neuron", "cpu")

NO_LAZY_PIPELINE = (
    "pipeline_parallel_size: lazy devices (xla) do not support pipelines yet; set it to 1 and use "
    "tensor_parallel_size, or choose an eager device"
)


def check_device_name(wish: str) -> None:
    """Raises UsageError for an unknown name."""
    if wish not in DEVICES:
        raise UsageError(f"device: {wish!r} is unknown; choose one of {', '.join(DEVICES)}")
