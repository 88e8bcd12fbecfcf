"""The names that the field `device` accepts."""

from __future__ import annotations

from stepmark.config.training_fields import DEVICES
from stepmark.errors import UsageError


def check_device_name(wish: str) -> None:
    """Raises UsageError for an unknown name."""
    if wish not in DEVICES:
        hint = ""
        if wish.startswith(("gpu", "cuda:")):
            hint = "; for GPUs use cuda: each rank takes one of those that CUDA_VISIBLE_DEVICES lists"
        raise UsageError(f"device: {wish!r} is unknown; choose one of {', '.join(DEVICES)}{hint}")
