"""ZeRO-1 against one rank with the same global batch: the same losses, tokens and gradient norms."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.mesh_parity import compare
from tests.support.ranks import Ranks


def options(**more: Any) -> list[dict[str, Any]]:
    return [{"model": {"kind": "gpt2"}, "steps": 20, "batch": 8, "zero_1": True, **more}]


def test_in_bf16(ranks: Ranks) -> None:
    """The ranks' own gradients are rounded before they are added, as they are without ZeRO-1."""
    compare(ranks, "cpu", 2, options(bf16=True), tolerance=1e-2)


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
    (expected,) = ranks.run("tests.support.zero1_programs:train_each", OPTIMIZERS, False).check()
    for found in ranks.run("tests.support.zero1_programs:train_each", OPTIMIZERS, True, nproc=2).check():
        for name, weights in expected.items():
            for parameter, values in weights.items():
                assert found[name][parameter] == pytest.approx(values, rel=1e-4, abs=1e-6), (name, parameter)


def test_optimizers_that_may_use_all_parameters_at_once_are_refused_by_name(ranks: Ranks) -> None:
    """Unless their class says what it does."""
    names = ["LBFGS", "Lamb", "RowNorm", "Derived", "Sign"]
    (found,) = ranks.run("tests.support.zero1_programs:refused", names).check()
    *refused, derived, accepted = found
    assert [message.startswith(f"zero_1: {name} ") for name, message in zip(names, refused, strict=False)] == [True] * 3
    assert derived.startswith("zero_1: ")
    assert all(each in derived for each in ("Derived", "`per_parameter = True`", "`elementwise = True`"))
    assert accepted == ""


@pytest.mark.parametrize("nproc", [2, 3])
def test_gradients_that_are_sent_during_the_backward_pass(ranks: Ranks, nproc: int) -> None:
    """Announcing the last backward pass changes no bit; another one after it is an error, as it would be lost."""
    found = ranks.run("tests.support.zero1_programs:announced", False, nproc=nproc).check()
    assert all(each == found[0] for each in found)
    assert found[0]["early"] == found[0]["late"]
    for each in ranks.run("tests.support.zero1_programs:announced", True, nproc=nproc).check():
        assert each["message"].startswith("a backward pass ran after the one that last_backward() announced")
