"""What `initialize_state` leaves as it was."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stepmark.parallel.optimizer.named import initialize_state
from stepmark.runtime.eager import EagerRuntime


class Counting(torch.optim.SGD):
    """Counts its steps in its groups: as a number, in a tensor and in a list."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        for group in self.param_groups:
            group.update(steps=3, total=torch.tensor(3.0), history=[1, 2, 3])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            group["steps"] += 1
            group["total"] += 1
            group["history"].append(group["steps"])


def test_groups_do_not_count_it() -> None:
    layer = nn.Linear(2, 2)
    optimizer = Counting(layer.parameters())
    (group,) = optimizer.param_groups
    total = group["total"]
    initialize_state(optimizer, list(layer.parameters()), EagerRuntime(torch.device("cpu")))
    assert optimizer.state[layer.weight]["momentum_buffer"] is not None
    assert (group["steps"], group["history"], group["lr"]) == (3, [1, 2, 3], 0.1)
    assert group["total"] is total
    assert total == 3
    assert layer.weight.grad is None
