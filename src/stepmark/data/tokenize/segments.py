"""Texts → batches of segments of bounded size, however long the documents and their lines are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from stepmark.data.sources.corpus import Corpus

BATCH_CHARACTERS = 1 << 18


class Segment(NamedTuple):
    """Text that is encoded together, and whether it begins and ends its document."""

    text: str
    starts: bool
    ends: bool


@dataclass
class Tally:
    """What was read: documents with text, and rows without any, which leave nothing to train on."""

    documents: int = 0
    without_text: int = 0


def segment_batches(corpus: Corpus, tally: Tally) -> Iterator[list[Segment]]:
    """The corpus in lists of about `BATCH_CHARACTERS` characters, at most twice that; counts documents in `tally`."""
    batch: list[Segment] = []
    characters = 0
    for segment in _segments(corpus, tally):
        batch.append(segment)
        characters += len(segment.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def joined(batch: Iterable[Segment]) -> list[Segment]:
    """The batch with consecutive segments of one document as one."""
    texts: list[list[str]] = []
    edges: list[tuple[bool, bool]] = []
    for text, starts, ends in batch:
        if starts or not texts:
            texts.append([text])
            edges.append((starts, ends))
        else:
            texts[-1].append(text)
            edges[-1] = (edges[-1][0], ends)
    return [Segment("".join(parts), *edge) for parts, edge in zip(texts, edges, strict=True)]


def _segments(corpus: Corpus, tally: Tally) -> Iterator[Segment]:
    for index, parts in groupby(corpus.numbered(), key=itemgetter(0)):
        texts = (text for _, text in parts)
        if corpus.sources[index].continuous:
            tally.documents += 1
            yield from _document(piece for text in texts if text for piece in cut(text))
            continue
        for text in texts:
            if text:
                tally.documents += 1
                yield from _document(cut(text))
            else:
                tally.without_text += 1


def _document(pieces: Iterable[str]) -> Iterator[Segment]:
    """The pieces of one document, the first and the last of which are marked."""
    waiting: str | None = None
    starts = True
    for piece in pieces:
        if waiting is not None:
            yield Segment(waiting, starts, False)
            starts = False
        waiting = piece
    if waiting is not None:
        yield Segment(waiting, starts, True)


def cut(text: str) -> Iterator[str]:
    """The text in pieces of at most `BATCH_CHARACTERS`, cut before a space or line end where there is one."""
    start = 0
    while len(text) - start > BATCH_CHARACTERS:
        limit = start + BATCH_CHARACTERS
        stop = max(text.rfind(" ", start + 1, limit), text.rfind("\n", start + 1, limit))
        stop = limit if stop == -1 else stop
        yield text[start:stop]
        start = stop
    yield text[start:]
