"""The output of `stepmark precompile`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stepmark.preflight.precompile.graph_text import ASK

if TYPE_CHECKING:
    from stepmark.preflight.precompile.graph_text import Graph

HEAD = ("graph", "operations", "parameters", "seconds", "state")


def describe(
    by_rank: Sequence[Sequence[Graph]],
    folder: str | None,
    *,
    reads_back: bool,
    stages: int = 1,
    for_neuron: bool = False,
) -> str:
    """The graphs of the first rank of each pipeline stage as a table, what is wrong with them, and whether the ranks of
    a stage have the same ones.

    Args:
        by_rank: The graphs of each rank, in the order in which they were made.
        folder: Where they are kept; None: nowhere.
        reads_back: Whether a later process on this device reads what was compiled.
        stages: Stages of the ranks' pipeline, each of as many ranks, which are neighbours.
        for_neuron: Whether the graphs are for Neuron's compiler, or may be later.
    """
    size = len(by_rank) // stages
    lines: list[str] = []
    for stage in range(stages):
        graphs = by_rank[stage * size]
        rows = [(graph.part, *_sizes(graph), f"{graph.seconds:.1f}", graph.state) for graph in graphs]
        lines += _aligned([HEAD, *rows])
        seconds = sum(graph.seconds for graph in graphs)
        ranks = f" on each of {size} ranks" if size > 1 else ""
        place = f" of pipeline stage {stage + 1}" if stages > 1 else ""
        kept = "" if folder is None else f", in {folder}"
        lines.append(f"{len(graphs)} graphs{place}{ranks} in {seconds:.1f} seconds{kept}")
        lines += [f"warning: {graph.part}: has {problem}" for graph in graphs for problem in graph.content.problems]
        lines += _differences(by_rank, range(stage * size, (stage + 1) * size))
    if for_neuron:
        lines += _unlisted(by_rank)
    if not reads_back:
        lines.append(
            "note: XLA's CPU client cannot read compiled graphs back, so a run on it compiles them again; set "
            "compile_cache to see in its metrics that it asks for no others"
        )
    return "\n".join(lines)


def _unlisted(by_rank: Sequence[Sequence[Graph]]) -> list[str]:
    """The operations of all graphs that Neuron's published list lacks."""
    names = sorted({name for graphs in by_rank for graph in graphs for name in graph.content.unlisted})
    if not names:
        return []
    return [f"note: Neuron's published list of operators lacks {', '.join(names)}; `{ASK}` shows the compiler's own"]


def _sizes(graph: Graph) -> tuple[str, str]:
    if not graph.key:  # it ran outside of a step boundary, where its text is not known
        return "?", "?"
    return str(graph.content.operations), str(graph.content.parameters)


def _differences(by_rank: Sequence[Sequence[Graph]], ranks: Sequence[int]) -> list[str]:
    """A warning where ranks of a stage have different graphs, with which collectives in the graph would hang."""
    keys = {rank: [graph.key for graph in by_rank[rank]] for rank in ranks}
    first = ranks[0]
    other = next((rank for rank, each in keys.items() if each != keys[first]), None)
    if other is None:
        return []
    return [
        f"warning: rank {other} has other graphs than rank {first}; with collectives in the graph the run would hang"
    ]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column in (1, 2, 3) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
