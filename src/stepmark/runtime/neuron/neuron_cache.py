"""Neuron's cache of compiled graphs: which it has, and how many of a process's graphs were among them.

Its folder has one for each version of the compiler (`neuronxcc-…`), with a folder `MODULE_<hash>` for each graph. The
compiler runs in a process of its own and does not say whether it found a graph there, but the graphs that a process
asks for, and those that appear in the folder meanwhile, can both be counted.
"""

from __future__ import annotations

from pathlib import Path

VERSIONS, GRAPHS = "neuronxcc-", "MODULE_"
DONE, BINARY = "model.done", "model.neff"
STUB = 1024  # bytes: a compiled graph is larger, the mark of a failed compilation is not


def has_binary(graph: Path) -> bool:
    """Whether the folder of a graph has the result of a compilation."""
    try:
        return (graph / BINARY).stat().st_size > STUB
    except OSError:
        return False


class CacheLookups:
    """Counts which of this process's graphs were in Neuron's cache when they were needed.

    As many were not there as have been added to `folder` since, up to the number that this process has asked for. A
    graph that another rank added at the same moment was not there either, and this process has waited for it. Other
    jobs must not add graphs meanwhile: theirs would be counted as well. Graphs that this process has `requested` before
    are not counted.
    """

    def __init__(self, folder: Path, requested: int = 0) -> None:
        self.folder = folder
        self._known = self._compiled(set())
        self._first = self._requested = requested
        self._missed = 0

    def count(self, requested: int) -> tuple[int, int]:
        """Graphs that were there and graphs that were not, so far; `requested` is the number that this process has
        asked for so far. Looks into the folder only where that has grown."""
        new = requested - self._requested
        if new > 0:
            added = self._compiled(self._known)
            self._known |= added
            self._requested = requested
            self._missed += min(new, len(added))
        return self._requested - self._first - self._missed, self._missed

    def _compiled(self, known: set[str]) -> set[str]:
        """The graphs that were compiled without an error, and are not among the known ones."""
        graphs = self.folder.glob(f"{VERSIONS}*/{GRAPHS}*")
        names = ((f"{graph.parent.name}/{graph.name}", graph) for graph in graphs)
        new = ((name, graph) for name, graph in names if name not in known)
        return {name for name, graph in new if has_binary(graph) or (graph / DONE).is_file()}
