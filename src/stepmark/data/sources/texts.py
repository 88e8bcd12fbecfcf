"""The texts of one split, from any source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

from stepmark.data.sources.file_kinds import TEXT, describe_counts
from stepmark.data.sources.read_meter import ReadMeter
from stepmark.errors import DataError


@dataclass(frozen=True)
class Texts:
    """The text segments of one source, in order.

    `read` starts from the beginning each time it is called; None and "" are segments without text. If `continuous`, the
    segments are parts of one document (the lines of a text file), else each is a document. `content` identifies the
    texts: it changes when they do. `where` names the source in messages, `reads` says what is read of it, `text_kind`
    is the extension of a file of plain text.
    """

    where: str
    content: str
    read: Callable[[], Iterator[str | None]]
    continuous: bool = False
    meter: ReadMeter | None = None
    reads: str = ""
    text_kind: str = ""

    def part(self, start: int, stop: int | None) -> Texts:
        """The segments from `start` to before `stop`."""
        ends = "" if stop is None else stop
        return replace(
            self,
            content=f"{self.content}[{start or ''}:{ends}]",
            read=lambda: islice(self.read(), start, stop),
        )


@dataclass(frozen=True)
class Corpus:
    """The texts of one split: one source after the other. `left_out` counts, by extension, files that lie beside them
    and are not read."""

    sources: tuple[Texts, ...]
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def where(self) -> str:
        first, more = self.sources[0].where, len(self.sources) - 1
        return first + (f" and {more} more file{'s' if more > 1 else ''}" if more else "")

    @property
    def is_plain(self) -> bool:
        """Whether all of it are files of plain text, which have no columns."""
        return all(source.text_kind for source in self.sources)

    @property
    def content(self) -> str:
        return " + ".join(source.content for source in self.sources)

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
        """How much of the sources has been read, from 0 to 1; None where that is unknown."""
        meters = [source.meter for source in self.sources if source.meter is not None]
        total = sum(meter.total for meter in meters)
        return sum(meter.done for meter in meters) / total if total else None

    def read(self) -> Iterator[str | None]:
        """The segments of all sources."""
        for source in self.sources:
            yield from source.read()

    def split(self, percentage: int) -> tuple[Corpus, Corpus]:
        """Training and validation texts: the first `percentage` percent of the segments, at least one, are validation.

        Raises DataError if no training text would remain.
        """
        counts = [sum(1 for _ in source.read()) for source in self.sources]
        count = sum(counts)
        held_out = max(1, count * percentage // 100)
        if held_out >= count:
            unit = "line" if all(source.continuous for source in self.sources) else "document"
            raise DataError(
                f"{self.where}: {count} {unit}{'' if count == 1 else 's'} cannot be split into training and validation;"
                " give validation_file, or validation_split_percentage: 0"
            )
        training: list[Texts] = []
        validation: list[Texts] = []
        for source, size in zip(self.sources, counts, strict=True):
            if held_out >= size:
                validation.append(source)
            elif held_out <= 0:
                training.append(source)
            else:
                validation.append(source.part(0, held_out))
                training.append(source.part(held_out, None))
            held_out -= size
        return Corpus(tuple(training), self.left_out), Corpus(tuple(validation))
