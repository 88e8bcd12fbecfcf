"""One graph that a lazy device has made, as `stepmark precompile` shows it."""

from __future__ import annotations

from dataclasses import dataclass

from stepmark.preflight.precompile.graph_text import GraphText

NEW, CACHED, EXTRACTED, UNKNOWN = "new", "in the cache", "extracted", "compiled"


@dataclass(frozen=True)
class Graph:
    """One graph of a run.

    Attributes:
        part: Of the run, such as "micro-step".
        content: Its size and problems.
        key: Hash of its text, which is the same on all ranks.
        seconds: Time to compile it, or to read it from the cache.
        state: One of the constants above.
    """

    part: str
    content: GraphText
    key: str
    seconds: float
    state: str
