"""Mixtures of experts train on meshes like on one rank: losses with those of routers, tokens, gradient norms."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import mesh_parity
from tests.support.models import EXPERTS
from tests.support.ranks import Ranks

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2}),
    "tp2, ZeRO-1": (4, {"tp": 2, "dp": 2, "zero_1": True}),
    "tp2, pp2": (4, {"tp": 2, "pp": 2}),
}
MORE: tuple[dict[str, Any], ...] = ({}, {"checkpointing": True}, {"clip": 0.1, "embedding": False})


def options(kind: str, steps: int, mesh: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": {"kind": kind}, "steps": steps, "accumulation": 2, "batch": 8, **mesh, **more}


def test_tensor_parallel_experts_train_like_one_rank(ranks: Ranks) -> None:
    count, mesh = MESHES["tp2"]
    cases = [options(kind, 3, mesh) for kind in EXPERTS]
    cases += [options("mixtral", 3, mesh, **more) for more in MORE[1:]]
    mesh_parity.compare(ranks, "cpu", count, cases, cut=True)


@pytest.mark.parametrize("mesh", [name for name in MESHES if name != "tp2"])
def test_with_other_axes(ranks: Ranks, mesh: str) -> None:
    count, axes = MESHES[mesh]
    mesh_parity.compare(ranks, "cpu", count, [options("gpt_oss", 3, axes)], cut=True)


@pytest.mark.prove
@pytest.mark.parametrize("mesh", MESHES)
def test_twenty_steps(ranks: Ranks, mesh: str, record_property: Any) -> None:
    count, axes = MESHES[mesh]
    cases = [options(kind, 20, axes, **more) for kind in EXPERTS for more in MORE]
    mesh_parity.compare(ranks, "cpu", count, cases, cut=True)
    record_property("trainings", len(cases))
