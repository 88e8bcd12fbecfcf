"""What a recorder notes beside the graphs of step boundaries."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.ranks import Ranks

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
