"""Programs for ranks whose torch has the simulated native device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from stepmark.checkpoint import Checkpointer
from stepmark.runtime.device import runtime_for
from stepmark.runtime.eager import kept_generators
from stepmark.training.alternatives import Alternatives
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


def saves_and_aliases(folder: str) -> dict[str, Any]:
    """Whether a save copies to pinned memory, and what a restore puts into tensors that share memory and may not."""
    checkpointer = Checkpointer(folder)
    state = {"a": torch.arange(8.0, device=DEVICE), "b": torch.arange(8.0, device=DEVICE) + 1}
    checkpointer.save(1, {"state": state})
    checkpointer.wait()
    staging = checkpointer._memory.take(1, pinned=True)
    both = torch.zeros(12, device=DEVICE)
    live = {"a": both[:8], "b": both[4:]}
    checkpointer.restore({"state": live})
    checkpointer.close()
    restored = {name: tensor.tolist() for name, tensor in live.items()}
    return {"pinned": staging.is_pinned(), "held": len(staging), "restored": restored}


def generators() -> dict[str, bool]:
    """Whether what draws inside of `kept_generators`, and in the alternatives of an operation, leaves no trace; on the
    host and the device."""
    runtime = runtime_for(torch.device(DEVICE, 0))
    runtime.seed(5)
    before = runtime.generator_state()
    device = torch.get_device_module(DEVICE)
    with kept_generators():
        torch.rand(3)
        device.manual_seed(7)
    kept = not runtime.drew_since(before)
    given = torch.ones(4, device=DEVICE)
    with Alternatives([(given, [torch.zeros_like(given)])]):
        torch.nn.functional.dropout(given)
    once = runtime.generator_state()
    runtime.set_generator_state(before)
    torch.nn.functional.dropout(given)
    return {"kept": kept, "alternatives draw nothing": torch.equal(once, runtime.generator_state())}


def train_model(name: str, folder: str, options: dict[str, Any], kill_at: int | None = None) -> dict[str, Any]:
    """Losses, gradient norms and weights of a model of `lazy_models` trained for six steps; `options` are arguments."""
    from tests.support import lazy_models

    other = lazy_models.OTHERS.get(name)
    torch.manual_seed(0)
    model, sample = (other[0](), other[1]) if other else (lazy_models.causal(name), lazy_models.packed)
    kills = [] if kill_at is None else [programs.KillAt(kill_at, None)]
    given = {"output_dir": folder, "logging_steps": 1, "optim": "adamw_torch", "learning_rate": 1e-3, **options}
    trainer = lazy_models.train(model, sample, *kills, **given)
    return {**programs.logged(Path(folder)), "weights": programs.checksum(trainer)}
