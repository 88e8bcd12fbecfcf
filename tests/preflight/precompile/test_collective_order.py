"""In the graph of a step, gradients can be sent while others are still computed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.preflight.precompile.test_own_graphs import recipe_of, texts_of_step
from tests.support.ranks import Ranks

HERE = "tests.preflight.precompile.test_collective_order"
LAYERS = {"llama": "num_hidden_layers", "gpt2": "n_layer"}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {"all_reduce": (2, {}), "reduce_scatter": (2, {"zero_1": True})}
_ASSIGNMENT = re.compile(r'\s*(%\w+)(?::\d+)? = "?([\w.]+)"?(.*)')
pytestmark = pytest.mark.xla


def products_before(text: str, collective: str) -> tuple[list[int], int]:
    """How many matrix products the operands of each such collective come from, in order, and how many there are."""
    before: dict[str, set[str]] = {}
    found = []
    for line in text.splitlines():
        match = _ASSIGNMENT.match(line)
        if match is None:
            continue
        name, operation, rest = match.groups()
        ancestors = set().union(*(before.get(operand, ()) for operand in re.findall(r"%\w+", rest)))
        if operation == f"stablehlo.{collective}":
            found.append(len(ancestors))
        before[name] = ancestors | ({name} if operation == "stablehlo.dot_general" else set())
    return found, text.count("stablehlo.dot_general")


def recorded(folder: str) -> dict[str, tuple[list[int], int]]:
    """`products_before` of the graph of a step of models with four layers, by model and collective."""
    found = {}
    for model, layers in LAYERS.items():
        for collective, (size, fields) in MESHES.items():
            recipe = recipe_of(Path(folder), model, fields)
            recipe["config_overrides"] = {**recipe["config_overrides"], layers: 4}
            with (
                mock.patch("stepmark.parallel.buckets.LAZY_BUCKET_ELEMENTS", 2000),
                mock.patch("stepmark.parallel.gradients.exchange.LAZY_BUCKET_ELEMENTS", 2000),
            ):
                text = texts_of_step(size, recipe)["step"]
            found[f"{model} {collective}"] = products_before(text, collective)
    return found


def test_last_layers_gradients_are_sent_before_the_first_layers_are_computed(ranks: Ranks, tmp_path: Path) -> None:
    (found,) = ranks.run(f"{HERE}:recorded", str(tmp_path)).check()
    for name, (products, total) in found.items():
        assert len(products) > 4, name
        assert products == sorted(products), name  # none waits for one whose gradients are complete later
        assert products[1] < 2 / 3 * total, name  # the first may have the loss alone
