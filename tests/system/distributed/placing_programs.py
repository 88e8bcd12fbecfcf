"""Counts the operations that sending values to a lazy device records."""

from __future__ import annotations

from typing import Any

import torch

from stepmark.runtime.context import start


def recorded() -> dict[str, Any]:
    """Operations that `place` and `write` record on a lazy device, and whether the values arrive."""
    import torch_xla.debug.metrics as metrics

    runtime = start("xla").runtime
    values = [torch.arange(6.0).view(2, 3), torch.tensor(1), torch.tensor([True, False]), torch.ones(2).bfloat16()]
    runtime.step_boundary(wait=True)

    def counts() -> dict[str, int]:
        names = [name for name in metrics.counter_names() if name.startswith("xla::")]
        return {name: metrics.counter_value(name) for name in names}

    before = counts()
    placed = runtime.place(values)
    target = runtime.place(torch.zeros(2, 3))
    runtime.write(target, values[0])
    after = counts()
    return {
        "operations": sorted(name for name, count in after.items() if count != before.get(name, 0)),
        "arrived": [torch.equal(a, b) for a, b in zip(values, runtime.to_host(placed), strict=True)],
        "written": torch.equal(values[0], runtime.to_host([target])[0]),
        "types": [str(tensor.dtype) for tensor in placed],
    }
