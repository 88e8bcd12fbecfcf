"""Records the graphs that a lazy device makes: in which part of the run, how large, and whether they were cached."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from stepmark.preflight.precompile.graph_text import CACHED, EXTRACTED, NEW, UNKNOWN, Graph, GraphText
from stepmark.runtime.xla import GraphCounts, XlaRuntime, graph_counts, host_operations, pending_graph

BETWEEN = "between step boundaries"


class GraphRecorder:
    """Notes every graph that the runtime's step boundaries make while `observing`. `part` names the part of the run
    that is in progress, and `after_boundary` the one that begins with the next step boundary; None: the same goes
    on."""

    def __init__(self, runtime: XlaRuntime, *, extracting: bool) -> None:
        self.part = "start"
        self.after_boundary: str | None = None
        self.graphs: list[Graph] = []
        self._runtime = runtime
        self._extracting = extracting
        self._counts = graph_counts()
        self._on_host = host_operations()

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Inside the block, step boundaries are observed."""
        with self._runtime.dispatching(self._dispatch):
            yield
        self._note_between(graph_counts())

    def name_reads(self, lines: Sequence[str]) -> None:
        """Adds the lines that read a value within a step to the first graph that ran between boundaries."""
        at = next((number for number, graph in enumerate(self.graphs) if graph.part.endswith(BETWEEN)), 0)
        content = self.graphs[at].content
        reads = tuple(f"a value that is read within the step, in every step: {line}" for line in lines)
        self.graphs[at] = replace(self.graphs[at], content=replace(content, problems=(*content.problems, *reads)))

    def _dispatch(self, run: Callable[[], None]) -> None:
        before = graph_counts()
        self._note_between(before)
        text, began = pending_graph(), time.perf_counter()
        run()
        after, seconds = graph_counts(), time.perf_counter() - began
        if after.requested > before.requested:
            state = self._state(before, after)
            compiling = after.compile_seconds - before.compile_seconds
            spent = compiling if after.compiled > before.compiled else seconds
            key = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
            self.graphs.append(Graph(self.part, GraphText.read(text), key, spent, state))
        self._counts = after
        self.part, self.after_boundary = self.after_boundary or self.part, None

    def _note_between(self, now: GraphCounts) -> None:
        """A graph that ran since the last boundary, as where a line reads a value or an operation ran on the host."""
        on_host, self._on_host = self._on_host, host_operations()
        grown = sorted(name for name, count in self._on_host.items() if count > on_host.get(name, 0))
        problems = tuple(f"an operation that runs on the host ({name})" for name in grown)
        if now.requested > self._counts.requested or problems:
            seconds = now.compile_seconds - self._counts.compile_seconds
            state = self._state(self._counts, now)
            self.graphs.append(Graph(f"{self.part}, {BETWEEN}", GraphText(0, 0, problems), "", seconds, state))
        self._counts = now

    def _state(self, before: GraphCounts, after: GraphCounts) -> str:
        if self._extracting:
            return EXTRACTED
        if after.cached > before.cached:
            return CACHED
        return NEW if after.missed > before.missed else UNKNOWN
