"""Programs for ranks whose torch has the simulated native device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from tests.support import programs
from tests.support.native import DEVICE


def train(options: dict[str, Any], lag: int = 0, lacks: Sequence[str] = ()) -> dict[str, Any]:
    """`programs.train` on the device, whose queue is behind by `lag` microseconds an operation, and which `lacks` some
    operations; with the device's counters."""
    import simulated_device

    simulated_device.c.set_lag(lag)
    for operation in lacks:
        simulated_device.c.refuse(operation)
    result = programs.train({"device": DEVICE, **options})
    return {**result, "device": simulated_device.c.counts()}


def train_drawing_on_the_host(options: dict[str, Any]) -> dict[str, Any]:
    """The same with a model that draws from the host's generator in its forward pass, as for a layer to be dropped."""
    forward = GPT2Block.forward

    def drawing(self: Any, hidden: torch.Tensor, *args: Any, **more: Any) -> Any:
        return forward(self, hidden * (0.5 + torch.rand(()).item()), *args, **more)

    GPT2Block.forward = drawing
    return train(options)
