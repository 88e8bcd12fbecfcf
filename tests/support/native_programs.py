"""Programs for ranks whose torch has the simulated native device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.save import snapshot
from stepmark.runtime.device import runtime_for
from stepmark.runtime.eager import kept_generators
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


def saves_beside_training(folder: str, writer: str) -> dict[str, Any]:
    """A save while an update is held back on the device, and one whose copies are until after the next update, which
    somebody precedes; see `WRITERS`."""
    import simulated_device

    device = simulated_device.c
    device.set_lag(100)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    main = torch.accelerator.current_stream()

    def step(before: Callable[[], object] = lambda: None) -> None:
        model(torch.ones(4, 8, device=DEVICE)).sum().backward()
        main.synchronize()  # the device as a whole would wait for what is held back
        before()
        waits.clear()
        optimizer.step()
        optimizer.zero_grad()

    def tensors() -> list[torch.Tensor]:
        states = [value for each in optimizer.state.values() for value in each.values()]
        return [tensor.detach().clone() for tensor in [*model.state_dict().values(), *states]]

    def soon(happens: Callable[[], bool]) -> bool:
        return any(happens() or time.sleep(0.01) for _ in range(30))

    waits: list[str] = []
    earlier = {name: value.clone() for name, value in model.state_dict().items()}
    with Checkpointer(folder, keep_last=2) as checkpointer:
        step()
        checkpointer.save(1, state)
        step(lambda: device.hold_back(main.stream_id))
        expected = {2: tensors()}
        behind = checkpointer.save(2, state)
        early = [soon(behind.done)]
        device.let_go()
        behind.result()
        step()
        expected[3] = tensors()
        main.synchronize()
        device.hold_back(snapshot._side_stream(torch.device(DEVICE, 0)).stream_id)
        device.tell_of_waits(waits.append)
        handle = checkpointer.save(3, state)
        of_save = list(waits)
        assert checkpointer._copies is not None
        later = len(checkpointer._copies._copies)
        step(lambda: WRITERS[writer](model, earlier))
        early += [handle.done(), soon(main.query)]
        device.tell_of_waits(None)
        device.let_go()
        handle.result()
        changed = not _same(tensors(), expected[3])
        restored = [checkpointer.restore(state, number) and _same(tensors(), expected[number]) for number in (2, 3)]
    found = {"later": later, "waits": [of_save, waits], "early": early, "hazard": device.counts()["hazard"]}
    return {**found, "changed": changed, "restored": restored}


def _same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return [tensor.tolist() for tensor in found] == [tensor.tolist() for tensor in expected]


def _swap_data(model: nn.Module, earlier: dict[str, torch.Tensor]) -> None:
    """As averages of weights are put in for an evaluation: torch counts nothing."""
    for name, parameter in model.named_parameters():
        parameter.data.copy_(earlier[name])


@torch.no_grad()
def _write_in_place(model: nn.Module, _: dict[str, torch.Tensor]) -> None:
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.mul_(3)


WRITERS: dict[str, Callable[[Any, dict[str, torch.Tensor]], object]] = {
    "nobody": lambda model, earlier: None,
    "data": _swap_data,
    "in place": _write_in_place,
    "load_state_dict": lambda model, earlier: model.load_state_dict(earlier),
}


def generators() -> dict[str, bool]:
    """Whether what draws inside of `kept_generators` leaves no trace; on the host and the device."""
    runtime = runtime_for(torch.device(DEVICE, 0))
    runtime.seed(5)
    before = runtime.generator_state()
    device = torch.get_device_module(DEVICE)
    with kept_generators():
        torch.rand(3)
        device.manual_seed(7)
    kept = torch.equal(before, runtime.generator_state())
    return {"kept": kept}


def seeds() -> dict[str, bool]:
    """Whether seeding the device gives all of its generators, and the host's, what `torch.manual_seed` does."""
    runtime, module = runtime_for(torch.device(DEVICE, 0)), torch.get_device_module(DEVICE)
    states = []
    for seed in (runtime.seed, torch.manual_seed):
        torch.manual_seed(1)
        seed(2**62 + 3)
        states.append([runtime.generator_state(), *(module.get_rng_state(n) for n in range(module.device_count()))])
    same = all(torch.equal(one, other) for one, other in zip(*states, strict=True))
    return {"same": same, "several": module.device_count() > 1, "current": runtime.current_seed() == 2**62 + 3}


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
