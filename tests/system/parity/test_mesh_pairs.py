"""Training on any mesh against one rank: models, meshes, ZeRO-1, optimizers and devices, every two of which meet."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest

from tests.support import mesh_parity
from tests.support.mesh_parity import MODELS
from tests.support.pairwise import Cell, pairwise
from tests.support.ranks import Ranks

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "fsdp2": (2, {"fsdp": True}),
    "tp2": (2, {"tp": 2, "embedding": False}),
    "tp2-sequence": (2, {"tp": 2, "sequence": True}),
    "pp2": (2, {"pp": 2}),
    "pp2-interleaved": (2, {"pp": 2, "schedule": "interleaved", "chunks": 2}),
    "tp4": (4, {"tp": 4}),
    "dp2-tp2": (4, {"tp": 2}),
    "dp2-pp2": (4, {"pp": 2, "schedule": "gpipe"}),
    "pp2-tp2": (4, {"pp": 2, "tp": 2, "sequence": True}),
}
AXES: dict[str, list[Any]] = {
    "mesh": list(MESHES),
    "optim": ["adamw_torch", "sgd", "muon", "adafactor"],
    "model": ["gpt2", "llama-one-kv-head", "qwen3-tied"],
    "device": ["cpu", "xla"],
    "zero_1": [False, True],
    "micro-batches": [1, 2],  # times the number of stages
    "more": [{}, {"checkpointing": True}, {"smoothing": 0.1}, {"clip": 0.1}],
}


def works(cell: Cell) -> bool:
    elementwise = cell["optim"] in ("adamw_torch", "sgd")  # others change their graph every step
    if "fsdp" in MESHES[cell["mesh"]][1]:
        return elementwise and cell["device"] == "cpu" and not cell["zero_1"]
    return elementwise or cell["device"] == "cpu"


def is_quick(cell: Cell) -> bool:
    """Lazy ranks compile for seconds each: in `make test` there are two."""
    return works(cell) and (cell["device"] == "cpu" or MESHES[cell["mesh"]][0] == 2)


TABLE = pairwise(AXES, is_quick)


def compare(ranks: Ranks, device: str, count: int, cells: list[Cell], steps: int) -> None:
    """Losses, tokens and gradient norms of the cells with that device and number of ranks are those of one rank. Within
    20 steps Adafactor makes 2e-5 of a gradient's last bit: one rank that adds two micro-batches is as far from it."""
    options: list[dict[str, Any]] = []
    for cell in cells:
        if (cell["device"], MESHES[cell["mesh"]][0]) == (device, count):
            mesh = MESHES[cell["mesh"]][1]
            model = {**MODELS[cell["model"]], "num_hidden_layers": 4 if "chunks" in mesh else 2}
            accumulation = cell["micro-batches"] * mesh.get("pp", 1)
            own = {"optim": cell["optim"], "zero_1": cell["zero_1"], "batch": 8, "accumulation": accumulation}
            long = {"tolerance": 1e-4} if cell["optim"] == "adafactor" and steps > 3 else {}
            options.append({"model": model, "steps": steps, **own, **cell["more"], **mesh, **long})
    mesh_parity.compare(ranks, device, count, options)


def test_every_two_values_meet() -> None:
    whole = [dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())]
    for (one, ones), (other, others) in combinations(AXES.items(), 2):
        for pair in product(ones, others):
            meets = any((cell[one], cell[other]) == pair for cell in TABLE)
            assert meets == any((cell[one], cell[other]) == pair for cell in whole if is_quick(cell)), pair
    assert all(map(is_quick, TABLE))
    assert len(TABLE) <= len(MESHES) * len(AXES["optim"]) + 8


@pytest.mark.parametrize(("device", "count"), [("cpu", 2), ("cpu", 4), pytest.param("xla", 2, marks=pytest.mark.xla)])
def test_every_pair_trains_like_one_rank(ranks: Ranks, device: str, count: int) -> None:
    compare(ranks, device, count, TABLE, steps=3)


@pytest.mark.prove
@pytest.mark.parametrize("device", ["cpu", pytest.param("xla", marks=pytest.mark.xla)])
@pytest.mark.parametrize("mesh", MESHES)
def test_the_whole_product_trains_like_one_rank(ranks: Ranks, mesh: str, device: str) -> None:
    axes = {**AXES, "mesh": [mesh], "device": [device]}
    cells = (dict(zip(axes, values, strict=True)) for values in product(*axes.values()))
    compare(ranks, device, MESHES[mesh][0], list(filter(works, cells)), steps=20)
