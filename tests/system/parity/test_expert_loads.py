"""The tokens that experts get, and the routing biases that follow them, on meshes like on one rank.

`mesh_parity` compares every expert's tokens of every step. The fourth step has rows that only fill its shape.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import mesh_parity
from tests.support.ranks import Ranks

TWO: tuple[dict[str, Any], ...] = (
    {"dp": 2},
    {"dp": 2, "zero_1": True, "checkpointing": True},
    {"dp": 2, "fsdp": True},
    {"tp": 2},
    {"pp": 2},
    {"pp": 2, "schedule": "gpipe", "checkpointing": True},
)
FOUR: tuple[dict[str, Any], ...] = ({"dp": 2, "tp": 2, "zero_1": True}, {"dp": 2, "pp": 2, "zero_1": True})
LAZY: tuple[dict[str, Any], ...] = ({"dp": 2}, {"pp": 2})


def options(mesh: dict[str, Any], steps: int = 4, kind: str = "deepseek_v3") -> dict[str, Any]:
    rate = {"bias_rate": 0.01} if kind == "deepseek_v3" else {}
    return {"model": {"kind": kind}, "steps": steps, "accumulation": 2, "batch": 8, **rate, **mesh}


def test_loads_and_biases_are_those_of_one_rank(ranks: Ranks) -> None:
    mesh_parity.compare(ranks, "cpu", 2, [options(mesh) for mesh in TWO], cut=True)


def test_loads_and_router_losses_are_those_of_one_rank(ranks: Ranks) -> None:
    """A router's loss is that of a rank's own micro-batch; the fourth step has one of another size."""
    cases = [options(mesh, kind="mixtral") for mesh in TWO if "fsdp" not in mesh]
    cases += [options({"dp": 2, "fsdp": True}, 3, "qwen3_moe")]
    mesh_parity.compare(ranks, "cpu", 2, cases, cut=True)


def test_with_several_axes(ranks: Ranks) -> None:
    mesh_parity.compare(ranks, "cpu", 4, [options(mesh) for mesh in FOUR], cut=True)


@pytest.mark.xla
def test_on_lazy_devices(ranks: Ranks) -> None:
    mesh_parity.compare(ranks, "threads", 2, [options(mesh) for mesh in LAZY], cut=True)
