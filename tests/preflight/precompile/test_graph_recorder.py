"""What a recorder notes beside the graphs of step boundaries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.ranks import Ranks
from tests.support.recipes import write_recipe

STEPS: dict[str, Callable[[Tensor], object]] = {
    "a product": lambda given: given @ given,
    "boolean indexing": lambda given: given[given > 0].sum(),
    "unique": lambda given: torch.unique(given).sum(),
    "a value that is read": lambda given: given.sum().item(),
}


def recorded() -> dict[str, list[list[str]]]:
    """The problems of each graph, for each of STEPS."""
    from stepmark.preflight.precompile.graph_recorder import GraphRecorder
    from stepmark.runtime.context import start

    runtime = start("xla").runtime
    found = {}
    for name, compute in STEPS.items():
        recorder = GraphRecorder(runtime, extracting=False)  # type: ignore[arg-type]
        (given,) = runtime.place([torch.randn(4, 4)])
        with recorder.observing():
            kept = compute(given)
            runtime.step_boundary(wait=True)
            del kept
        found[name] = [list(graph.content.problems) for graph in recorder.graphs]
    return found


@pytest.mark.xla
def test_operations_that_run_on_the_host_are_named(ranks: Ranks) -> None:
    (found,) = ranks.run(f"{__name__}:recorded").check()
    problems = {name: [each for graph in graphs for each in graph] for name, graphs in found.items()}
    assert problems["a product"] == problems["a value that is read"] == []
    assert "an operation that runs on the host (aten::nonzero)" in problems["boolean indexing"]
    assert any("aten::" in each for each in problems["unique"])


def precompiled(folder: str) -> list[list[str]]:
    """The problems of the graphs of a recipe whose model reads a value in its forward pass."""
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    from stepmark.config.recipe import read_recipe
    from stepmark.preflight.precompile.precompile import graphs_of

    forward = GPT2MLP.forward

    def reads(self: GPT2MLP, hidden_states: Tensor) -> Tensor:
        assert hidden_states.sum().item() == hidden_states.sum().item()
        return forward(self, hidden_states)

    GPT2MLP.forward = reads
    recipe = write_recipe(Path(folder), device="xla", compile_cache=str(Path(folder) / "graphs"))
    recorder, _ = graphs_of(read_recipe(str(recipe), {}))
    return [list(graph.content.problems) for graph in recorder.graphs]


@pytest.mark.xla
def test_a_line_that_reads_a_value_in_the_forward_pass_is_named(ranks: Ranks, tmp_path: Path) -> None:
    (found,) = ranks.run(f"{__name__}:precompiled", str(tmp_path)).check()
    problems = [each for graph in found for each in graph]
    assert any("test_graph_recorder.py" in each and "is read" in each for each in problems)
