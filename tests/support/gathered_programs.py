"""Programs for ranks: optimizers that use whole parameters of a model that tensor parallelism shards."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from stepmark import Mesh, Trainer, TrainingArguments, ZeroRedundancyOptimizer, parallelize
from tests.support.models import build
from tests.support.programs import Blocks, KillAt, logged
from tests.support.whole_parameter_programs import Lamb


def given(folder: str, kill_at: int | None, options: dict[str, Any]) -> dict[int, Any]:
    """The losses of a Trainer that was given an optimizer over the parameters, before it shards them."""
    args = TrainingArguments(
        output_dir=folder, device="cpu", max_steps=6, save_steps=2, logging_steps=1, disable_tqdm=True,
        per_device_train_batch_size=4, **options,
    )  # fmt: skip
    model = build("gpt2")
    callbacks = [] if kill_at is None else [KillAt(kill_at, None)]
    optimizers = (Lamb(model.parameters()), None)
    Trainer(model, args, train_dataset=Blocks(24), optimizers=optimizers, callbacks=callbacks).train()
    return logged(Path(folder))["losses"]


def custom_loop(tensor_parallel_size: int) -> dict[str, Any]:
    """The norms of 6 steps of a loop of the user's; whether a state dict goes on bit for bit; whether a parameter
    that is written between steps keeps its value under a learning rate of 0, and master weights of bfloat16 ones keep
    theirs; and which parameters have a state after a step in which one layer alone took part."""
    mesh = Mesh.create(tensor_parallel_size=tensor_parallel_size, device="cpu")
    axis, samples = mesh.data_parallel, Blocks(48, ragged=False)

    def make(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
        model = parallelize(build("gpt2").to(dtype), mesh)
        return model, ZeroRedundancyOptimizer(model.named_parameters(), Lamb, mesh=mesh)

    def go_on(model: Any, optimizer: Any, steps: range) -> list[float]:
        norms = []
        for step in steps:
            own = [samples[8 * step + index] for index in range(axis.rank, 8, axis.size)]
            model(**{key: torch.stack([sample[key] for sample in own]) for key in own[0]}).loss.backward()
            optimizer.step()
            norms.append(float(optimizer.grad_norm))
        return norms

    model, optimizer = make()
    norms = go_on(model, optimizer, range(3))
    saved = deepcopy((model.state_dict(), optimizer.state_dict()))
    norms += go_on(model, optimizer, range(3, 6))
    other, resumed = make()
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    same = go_on(other, resumed, range(3, 6)) == norms[3:]
    same = same and [group["steps"] for group in resumed.param_groups] == [6]
    weight = other.transformer.h[0].attn.c_attn.weight
    torch.nn.init.constant_(weight, 0.25)
    for group in resumed.param_groups:
        group["lr"] = 0.0
    go_on(other, resumed, range(1))
    rounded, optimizer = make(torch.bfloat16)
    go_on(rounded, optimizer, range(2))
    before = deepcopy(masters(optimizer))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    go_on(rounded, optimizer, range(2, 3))
    pairs = [(before[name], master) for name, master in masters(optimizer).items()]
    precise = all(torch.equal(*pair) for pair in pairs) and any((old != old.bfloat16()).any() for old, _ in pairs)
    model, optimizer = make()
    model.transformer.h[0].mlp.c_fc(torch.ones(1, 2, 32)).sum().backward()
    optimizer.step()
    used = sorted(name for name, state in optimizer.state_dict()["state"].items() if state)
    return {"norms": norms, "same": same, "kept": bool((weight == 0.25).all()), "precise": precise, "used": used}


def masters(optimizer: Any) -> dict[str, torch.Tensor]:
    return {name: state["master"] for name, state in optimizer.state_dict()["state"].items()}
