"""Lines about tokenizing: how far it is, how long it will take, what was read and what was left out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from stepmark.data.sources.corpus import Corpus
from stepmark.data.tokenize.segments import Tally

SECONDS_A_LINE = 10.0
MOST_MINUTES_IN_SECONDS = 2


class TokenizingProgress:
    """Reports one split through `say` from time to time."""

    def __init__(self, split: str, texts: Corpus, say: Callable[[str], None]) -> None:
        self._split, self._texts, self._say = split, texts, say
        self._began = self._said = time.monotonic()

    def at(self, tokens: int) -> None:
        """This many tokens are written."""
        now = time.monotonic()
        if now - self._said < SECONDS_A_LINE:
            return
        self._said = now
        fraction = self._texts.fraction
        left = f", {fraction:.0%}, {_duration(self._seconds_left(fraction))} left" if fraction else ""
        self._say(f"tokenizing {self._split}: {tokens / 1e6:.1f} million tokens{left}")

    def _seconds_left(self, fraction: float) -> float:
        return (time.monotonic() - self._began) * max(1 - fraction, 0.0) / fraction


def describe_split(split: str, meta: dict[str, Any], *, cached: bool) -> str:
    """One line about a tokenized split, from its metadata."""
    read = meta["read"][split]
    tokens, documents, without_text = meta["tokens"][split], read["documents"], read["without_text"]
    line = (
        f"{'cached' if cached else 'tokenized'} {split}: {_amount(tokens)} tokens in"
        f" {documents:,} document{'' if documents == 1 else 's'}"
    )
    if without_text:
        line += f"; {without_text:,} without text left out"
    return line


def read_summary(tally: Tally) -> dict[str, int]:
    """What the metadata keeps of a split's tally."""
    return {"documents": tally.documents, "without_text": tally.without_text}


def _amount(count: int) -> str:
    return f"{count / 1e6:.1f} million" if count >= 1e6 else f"{count:,}"


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < MOST_MINUTES_IN_SECONDS else f"{minutes:.0f} min"
