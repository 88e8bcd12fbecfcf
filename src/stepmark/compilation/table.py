"""What `stepmark precompile` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepmark.compilation.graph import Graph

HEAD = ("graph", "operations", "parameters", "seconds", "state")


def describe(by_rank: Sequence[Sequence[Graph]], folder: str | None, *, reads_back: bool) -> str:
    """The graphs of rank 0 as a table, what is wrong with them, and whether the ranks have the same ones.

    Args:
        by_rank: The graphs of each rank, in the order in which they were made.
        folder: Where they are kept.
        reads_back: Whether a later process on this device reads what was compiled.
    """
    graphs = by_rank[0]
    rows = [(graph.part, *_sizes(graph), f"{graph.seconds:.1f}", graph.state) for graph in graphs]
    lines = _aligned([HEAD, *rows])
    seconds = sum(graph.seconds for graph in graphs)
    ranks = f" on each of {len(by_rank)} ranks" if len(by_rank) > 1 else ""
    lines.append(f"{len(graphs)} graphs{ranks} in {seconds:.1f} seconds, in {folder}")
    lines += [f"warning: {graph.part}: has {problem}" for graph in graphs for problem in graph.content.problems]
    lines += _differences(by_rank)
    if not reads_back:
        lines.append(
            "note: XLA's CPU client cannot read compiled graphs back, so a run on it compiles them again; set "
            "compile_cache to see in its metrics that it asks for no others"
        )
    return "\n".join(lines)


def _sizes(graph: Graph) -> tuple[str, str]:
    if not graph.key:  # it ran outside of a step boundary, where its text is not known
        return "?", "?"
    return str(graph.content.operations), str(graph.content.parameters)


def _differences(by_rank: Sequence[Sequence[Graph]]) -> list[str]:
    """Ranks that run different graphs wait for each other in collectives for ever."""
    keys = [[graph.key for graph in graphs] for graphs in by_rank]
    other = next((rank for rank, each in enumerate(keys) if each != keys[0]), None)
    if other is None:
        return []
    return [f"warning: rank {other} has other graphs than rank 0; with collectives in the graph the run would hang"]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column in (1, 2, 3) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
