"""Programs for ranks whose torch has the simulated native device."""

from __future__ import annotations

from typing import Any

from tests.support import programs
from tests.support.native import DEVICE


def train(options: dict[str, Any], lag: int = 0) -> dict[str, Any]:
    """`programs.train` on the device, whose queue is behind by `lag` microseconds an operation; with the device's
    counters."""
    import simulated_device

    simulated_device.c.set_lag(lag)
    result = programs.train({"device": DEVICE, **options})
    return {**result, "device": simulated_device.c.counts()}
