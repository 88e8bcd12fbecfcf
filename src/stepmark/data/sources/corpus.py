"""The contents of one split, from any source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from stepmark.data.sources.reading import ReadMeter
from stepmark.data.sources.source_files import TEXT, describe_counts
from stepmark.errors import DataError


@dataclass(frozen=True)
class Source:
    """One file or dataset, as parts: texts, or named rows of chat data. `where` is its name in messages, and `content`
    identifies the parts: it changes when they do. `read` returns the parts from the beginning, at each call; texts may
    be None or "". `continuous`: the parts are consecutive texts of one document (the lines of a file); else each is a
    document. `reads`: what is read of it, in words. `text_kind`: the extension of a file of plain text."""

    where: str
    content: str
    read: Callable[[], Iterator[Any]]
    continuous: bool = False
    meter: ReadMeter | None = None
    reads: str = ""
    text_kind: str = ""


@dataclass(frozen=True)
class Corpus:
    """The parts `start` to before `stop` of one source after the other. `left_out` counts, by extension, files beside
    them that are not read; `unit` is a part in words."""

    sources: tuple[Source, ...]
    left_out: Counter[str] = field(default_factory=Counter)
    unit: str = "document"
    start: int = 0
    stop: int | None = None

    @property
    def where(self) -> str:
        first, more = self.sources[0].where, len(self.sources) - 1
        return first + (f" and {more} more file{'s' if more > 1 else ''}" if more else "")

    @property
    def is_plain(self) -> bool:
        """Whether all sources are files of plain text, which have no columns."""
        return all(source.text_kind for source in self.sources)

    @property
    def content(self) -> str:
        content = " + ".join(source.content for source in self.sources)
        return f"{content}[{self.start}:{self.stop}]" if self.start or self.stop is not None else content

    @property
    def reads(self) -> str:
        """What is read of the sources, and what is not; in one line."""
        kinds = list(dict.fromkeys(source.reads for source in self.sources if source.reads))
        what = f"{'; '.join(kinds)} of {self.where}" if kinds else self.where
        plain = Counter(source.text_kind for source in self.sources if source.text_kind)
        if plain.keys() - {TEXT}:
            what += f"; as plain text: {describe_counts(plain)}"
        if self.left_out:
            what += f"; left out: {describe_counts(self.left_out)}"
        return what

    @property
    def fraction(self) -> float | None:
        """How much has been read, from 0 to 1; None where that is unknown."""
        meters = [source.meter for source in self.sources if source.meter is not None]
        total = sum(meter.total for meter in meters)
        return sum(meter.done for meter in meters) / total if total and self.stop is None else None

    def read(self) -> Iterator[Any]:
        return (part for _, part in self.numbered())

    def numbered(self) -> Iterator[tuple[int, Any]]:
        """The parts, each with the index of its source."""
        parts = ((index, part) for index, source in enumerate(self.sources) for part in source.read())
        return islice(parts, self.start, self.stop)

    def split(self, percentage: int) -> tuple[Corpus, Corpus]:
        """Training and validation data: the first `percentage` percent of the parts, at least one, are validation.

        Raises DataError if nothing would remain to train on.
        """
        count = sum(1 for _ in self.read())
        held_out = max(1, count * percentage // 100)
        if held_out >= count:
            unit = "line" if all(source.continuous for source in self.sources) else self.unit
            raise DataError(
                f"{self.where}: {count} {unit}{'' if count == 1 else 's'} cannot be split into training and validation;"
                " give validation_file, or validation_split_percentage: 0"
            )
        return replace(self, start=held_out), replace(self, stop=held_out)
