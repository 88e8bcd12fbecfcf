"""ZeRO-1 against one rank with the same global batch: the same losses, tokens and gradient norms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.mesh_checkpoints import checksums
from tests.support.mesh_parity import compare
from tests.support.programs import logged
from tests.support.ranks import Ranks

CASES: list[tuple[int, dict[str, Any]]] = [
    (2, {"accumulation": 2, "optim": "sgd"}),
    (4, {}),
    (2, {"bf16": True}),
]


def options(**more: Any) -> list[dict[str, Any]]:
    return [{"model": {"kind": "gpt2"}, "steps": 20, "batch": 8, "zero_1": True, **more}]


@pytest.mark.parametrize(("nproc", "more"), CASES)
def test_on_cpu(ranks: Ranks, nproc: int, more: dict[str, Any]) -> None:
    # In bf16 the ranks' own gradients are rounded before they are added, as they are without ZeRO-1.
    compare(ranks, "cpu", nproc, options(**more), tolerance=1e-2 if "bf16" in more else None)


@pytest.mark.xla
@pytest.mark.parametrize("where", ["xla", "threads"])
def test_on_lazy_devices(ranks: Ranks, where: str) -> None:
    """Without accumulation in test_mesh_pairs.py."""
    compare(ranks, where, 2, options(steps=6, accumulation=2))


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "SGD": {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "RAdam": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "Adagrad": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "centered": True, "momentum": 0.5},
    "Adadelta": {"lr": 0.5},
    "Adamax": {"lr": 0.01},
    "ASGD": {"lr": 0.01},
    "Rprop": {"lr": 0.01},
}


def test_every_elementwise_optimizer(ranks: Ranks) -> None:
    for name, options in OPTIMIZERS.items():
        (expected,) = ranks.run("tests.support.zero1_programs:train", name, options, False).check()
        for found in ranks.run("tests.support.zero1_programs:train", name, options, True, nproc=2).check():
            for parameter, values in expected.items():
                assert found[parameter] == pytest.approx(values, rel=1e-4, abs=1e-6), (name, parameter)


@pytest.mark.parametrize("name", ["LBFGS", "Lamb", "RowNorm"])
def test_optimizers_that_may_use_all_parameters_at_once_are_refused_by_name(ranks: Ranks, name: str) -> None:
    (message,) = ranks.run("tests.support.zero1_programs:refused", name).check()
    assert message.startswith(f"zero_1: {name} ")


def test_an_unknown_optimizer_class_is_refused_with_the_remedy(ranks: Ranks) -> None:
    (message,) = ranks.run("tests.support.zero1_programs:refused", "Derived").check()
    assert message.startswith("zero_1: ")
    assert "Derived" in message
    assert "`per_parameter = True`" in message
    assert "`elementwise = True`" in message


def test_a_class_that_says_it_is_elementwise_is_accepted(ranks: Ranks) -> None:
    assert ranks.run("tests.support.zero1_programs:refused", "Sign").check() == [""]


@pytest.mark.parametrize("nproc", [2, 3])
def test_gradients_that_are_sent_during_the_backward_pass(ranks: Ranks, nproc: int) -> None:
    """Announcing the last backward pass changes no bit; another one after it is an error, as it would be lost."""
    found = ranks.run("tests.support.zero1_programs:announced", False, nproc=nproc).check()
    assert all(each == found[0] for each in found)
    assert found[0]["early"] == found[0]["late"]
    for each in ranks.run("tests.support.zero1_programs:announced", True, nproc=nproc).check():
        assert each["message"].startswith("a backward pass ran after the one that last_backward() announced")


SAVED = [(1, False), (3, True)]  # number of ranks, and whether they share the optimizer's state
MESHES = [(1, False), (1, True), (2, True), (3, True), (2, False)]


@pytest.mark.parametrize(
    ("dtype", "saved_on"),
    [
        pytest.param("float32", SAVED, marks=pytest.mark.prove),
        pytest.param("bfloat16", SAVED, marks=pytest.mark.prove),
        ("bfloat16", SAVED[1:]),
    ],
)
def test_a_checkpoint_of_any_mesh_restores_on_any_other(
    ranks: Ranks, tmp_path: Path, dtype: str, saved_on: list[tuple[int, bool]]
) -> None:
    for nproc, sharded in saved_on:
        folder = tmp_path / f"{nproc}"
        saved = ranks.run("tests.support.zero1_programs:save", str(folder), sharded, dtype, nproc=nproc).check()
        if sharded:  # exp_avg and exp_avg_sq of 56 elements, masters of bf16, and a step for each parameter of a rank
            states = 3 if dtype == "bfloat16" else 2
            held = zip((19, 19, 18), (1, 3, 2), strict=True)
            assert [rank["bytes"] for rank in saved] == [4 * (states * elements + steps) for elements, steps in held]
        losses = []
        for other, other_sharded in MESHES:
            arguments = (str(folder), other_sharded, dtype)
            found = ranks.run("tests.support.zero1_programs:restore", *arguments, nproc=other).check()
            losses.append(found[0]["losses"])
            assert checksums(Path(found[0]["again"])) == checksums(folder / "checkpoint-1")
        for each in losses:
            assert each == pytest.approx(losses[0], rel=1e-5 if dtype == "float32" else 3e-2)


@pytest.mark.parametrize("device", ["cpu", pytest.param("xla", marks=[pytest.mark.xla, pytest.mark.prove])])
def test_the_trainer_shards_and_resumes(ranks: Ranks, tmp_path: Path, device: str) -> None:
    """A killed and resumed run is bit for bit the same, and close to one that does not shard."""
    options = {"device": device, "save_strategy": "steps", "save_steps": 2, "dropout": 0.0, "zero_1": True}

    def run(name: str, **more: Any) -> dict[str, Any]:
        told = {**options, **more, "output_dir": str(tmp_path / name)}
        ranks.run("tests.support.programs:train", told, nproc=2)
        return logged(tmp_path / name)["losses"]

    whole = run("whole", zero_1=False)
    undisturbed = run("undisturbed")
    run("killed", kill_at=5)
    assert run("killed", resume_from_checkpoint=True) == undisturbed
    assert len(undisturbed) == 8
    for step, values in whole.items():
        assert undisturbed[step] == pytest.approx(values, rel=1e-5 if device == "cpu" else 1e-4)
