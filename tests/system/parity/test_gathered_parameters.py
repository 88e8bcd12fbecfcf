"""Optimizers that use whole parameters, where tensor parallelism shards them: against one rank with the same global
batch, from any mesh to any other, and resumed."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from stepmark import Mesh, Trainer, TrainingArguments, ZeroRedundancyOptimizer, parallelize
from tests.support.mesh_parity import compare
from tests.support.models import build
from tests.support.programs import Blocks, KillAt, logged
from tests.support.ranks import Ranks
from tests.support.whole_parameter_programs import Lamb
from tests.system.parity.test_mesh_checkpoints import check_pairs, save

OPTIMIZERS = ["muon", "adafactor", "lamb"]
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2}),
    "tp2-sequence": (2, {"tp": 2, "sequence": True}),
    "tp4": (4, {"tp": 4}),
    "tp2-dp2": (4, {"tp": 2}),
    "tp2-dp2-zero": (4, {"tp": 2, "zero_1": True, "sequence": True}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2, "accumulation": 2}),
    "tp2-pp2-zero": (4, {"tp": 2, "pp": 2, "zero_1": True, "accumulation": 2}),
}


def compare_all(ranks: Ranks, kind: str, meshes: list[str], steps: int) -> None:
    """On these meshes, with every optimizer."""
    for count, axes in (MESHES[mesh] for mesh in meshes):
        options = [{"model": {"kind": kind}, "optim": optim, "steps": steps, **axes} for optim in OPTIMIZERS]
        compare(ranks, "cpu", count, options)


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_twenty_steps_are_those_of_one_rank_on_any_mesh(ranks: Ranks, kind: str) -> None:
    """Two ranks of four hold the same key and value heads of Llama."""
    compare_all(ranks, kind, list(MESHES), steps=20)


@pytest.mark.parametrize("optim", [pytest.param("adafactor", marks=pytest.mark.prove), "lamb"])
@pytest.mark.parametrize("bf16", [pytest.param(False, marks=pytest.mark.prove), True])
def test_a_checkpoint_of_any_mesh_restores_on_any_other(ranks: Ranks, tmp_path: Path, optim: str, bf16: bool) -> None:
    """Every tensor of it, master weights included, and training goes on alike."""
    model = {"kind": "gpt2"}
    targets = ["dp1", "tp2", "dp2-tp2-zero", "pp2-tp2", "dp4-zero"]
    sources = targets
    if optim == "lamb" and bf16:  # in `make test`
        sources, targets = ["dp2-tp2-zero"], ["dp1", "tp2"]
    for mesh in sources:
        save(ranks, tmp_path, mesh, model, optim=optim, bf16=bf16)
    check_pairs(ranks, tmp_path, sources, targets, 2e-2 if bf16 else 1e-5, model=model, optim=optim, bf16=bf16)


def test_an_optimizer_that_the_user_has_made_gets_whole_parameters(ranks: Ranks, tmp_path: Path) -> None:
    (alone,) = ranks.run(given, str(tmp_path / "alone"), None, {}).check()
    told: dict[str, Any] = {"tensor_parallel_size": 2}
    assert -9 in ranks.run(given, str(tmp_path / "killed"), 5, told, nproc=2).codes
    assert len(alone) == 6
    for resumed, whole in ranks.run(resumed_and_whole, str(tmp_path), told, nproc=2).check():
        assert resumed == whole
        for step, loss in alone.items():
            assert whole[step] == pytest.approx(loss, rel=1e-5)


def test_a_custom_loop_divides_whole_parameters_over_both_axes(ranks: Ranks) -> None:
    program = custom_loop
    (alone,) = ranks.run(program, 1).check()
    assert len(alone["used"]) == 2
    results = ranks.run(program, 2, nproc=4).check()
    assert sorted({name for found in results for name in found["used"]}) == alone["used"]
    for found in results:
        assert found["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        assert found["same"]
        assert found["kept"]
        assert found["precise"]


# What ranks run


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


def resumed_and_whole(folder: str, options: dict[str, Any]) -> list[dict[int, Any]]:
    resumed = given(f"{folder}/killed", None, {**options, "resume_from_checkpoint": True})
    return [resumed, given(f"{folder}/whole", None, options)]


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
