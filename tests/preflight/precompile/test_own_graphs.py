"""The graphs of our own steps on every mesh have nothing in them that a compiler for accelerators rejects.

They are those of an accelerator, with collectives in the graph, as one rank records them: nothing is compiled or run,
so the other ranks need not be there. What a boundary would have run stays pending, so a text has what came before too.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from stepmark.liveness.host_group import HostGroup
from tests.support.ranks import Ranks
from tests.support.recipes import tiny_recipe

HERE = "tests.preflight.precompile.test_own_graphs"
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 4}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 32, "vocab_size": 260},
    "llama": {**SMALL, "num_key_value_heads": 2, "vocab_size": 260},
    "qwen3": {**SMALL, "num_key_value_heads": 2, "vocab_size": 260},
}
ACCUMULATED = {"gradient_accumulation_steps": 2}
TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {**ACCUMULATED, "dtype": "bfloat16"}),
    "data parallel": (2, {"bf16": True, "gradient_checkpointing": True}),
    "ZeRO-1": (2, {**ACCUMULATED, "zero_1": True}),
    "tensor parallel": (2, TENSOR),
    "sequence parallel": (2, {**TENSOR, "sequence_parallel": True, "dtype": "bfloat16"}),
    "tensor parallel, ZeRO-1": (4, {**TENSOR, **ACCUMULATED, "zero_1": True}),
}
REDUCED, SHARDED = {"all_reduce"}, {"all_reduce", "all_gather", "reduce_scatter"}
COLLECTIVES: dict[str, set[str]] = {
    "one rank": set(),
    "data parallel": REDUCED,
    "ZeRO-1": SHARDED,
    "tensor parallel": REDUCED,
    "sequence parallel": SHARDED,
    "tensor parallel, ZeRO-1": SHARDED,
}
pytestmark = pytest.mark.xla


class OneForAll(HostGroup):
    """Rank 0 of several ranks that all do the same."""

    def all_gather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def broadcast(self, value: Any = None, source: int = 0) -> Any:
        return value


class Recorded(Exception):
    """The step has been recorded."""


def recorded(recipes: dict[str, tuple[int, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """By recipe: the parts of a step, the collectives in them, their problems, and how many graphs were compiled."""
    from stepmark.runtime.xla import graph_counts

    found = {}
    for name, (size, fields) in recipes.items():
        before = graph_counts().requested
        texts = texts_of_step(size, fields)
        found[name] = {**read(texts), "compiled": graph_counts().requested - before}
    return found


def texts_of_step(size: int, fields: dict[str, Any]) -> dict[str, str]:
    """What each part of a step leaves pending at its boundary, on rank 0 of `size`."""
    import torch_xla

    from stepmark.config.recipe import read_recipe
    from stepmark.preflight.precompile.graph_recorder import GraphRecorder
    from stepmark.preflight.precompile.precompile import graphs_of
    from stepmark.runtime import context
    from stepmark.runtime.xla import XlaRuntime, pending_graph

    texts: dict[str, str] = {}
    runtime = XlaRuntime()
    runtime.in_graph_collectives = size > 1
    world = context.World(rank=0, size=size, local_rank=0, local_size=size)
    path = Path(fields["output_dir"]).with_name("recipe.json")
    path.write_text(json.dumps(fields))

    class Recorder(GraphRecorder):
        def _dispatch(self, run: Callable[[], None]) -> None:
            texts[self.part] = pending_graph()
            if self.part in ("step", "update"):
                raise Recorded
            self.part, self.after_boundary = self.after_boundary or self.part, None

    with (
        mock.patch("torch_xla.runtime.world_size", return_value=size),
        mock.patch.dict(context._started, {"xla": context.Context(world, runtime, OneForAll(0, size))}),
        mock.patch("stepmark.preflight.precompile.graph_recorder.GraphRecorder", Recorder),
        contextlib.suppress(Recorded),
    ):
        graphs_of(read_recipe(str(path), {}))
    torch_xla._XLAC._clear_pending_irs(str(runtime.device))  # never to run; the next recipe's texts would have it
    return texts


def read(texts: dict[str, str]) -> dict[str, Any]:
    from stepmark.preflight.precompile.graph_text import GraphText

    graphs = {part: GraphText.read(text) for part, text in texts.items()}
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    return {
        "parts": {part: graph.operations for part, graph in graphs.items()},
        "collectives": [kind for kind in kinds if any(f"stablehlo.{kind}" in text for text in texts.values())],
        "problems": sorted({problem for graph in graphs.values() for problem in graph.problems}),
    }


def test_graphs_of_every_mesh(ranks: Ranks, tmp_path: Path) -> None:
    recipes = {
        f"{model}, {mesh}": (size, recipe_of(tmp_path, model, fields))
        for model in CONFIGURATIONS
        for mesh, (size, fields) in MESHES.items()
    }
    (found,) = ranks.run(f"{HERE}:recorded", recipes).check()
    for model in CONFIGURATIONS:
        for mesh in MESHES:
            graphs = found[f"{model}, {mesh}"]
            accumulates = "gradient_accumulation_steps" in MESHES[mesh][1]
            parts = ["micro-step", "last micro-step", "update"] if accumulates else ["step"]
            assert list(graphs["parts"]) == parts, mesh
            assert min(graphs["parts"].values()) > 100, mesh
            assert set(graphs["collectives"]) == COLLECTIVES[mesh], mesh
            assert graphs["problems"] == [], mesh
            assert graphs["compiled"] == 0


def recipe_of(folder: Path, model: str, fields: dict[str, Any]) -> dict[str, Any]:
    given = {"device": "xla", "config_name": model, "config_overrides": CONFIGURATIONS[model], **fields}
    return tiny_recipe(folder, **given, compile_cache=str(folder / "cache"))
