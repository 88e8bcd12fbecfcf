"""Which optimizers of `torch.optim` update a tensor in one pass over its memory, where nobody has chosen otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_CHOICES = ("fused", "foreach", "differentiable", "capturable")


def fused_unless_chosen(kind: Any, device: torch.device, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's arguments, with `fused=True` where this class has a fused kernel on the device and the arguments
    say nothing about how to compute. Results differ from those of the other ways by rounding."""
    supported = device.type in _get_fused_kernels_supported_devices()
    if kind in _FUSED and supported and not any(arguments.get(choice) is not None for choice in _CHOICES):
        return {**arguments, "fused": True}
    return dict(arguments)
