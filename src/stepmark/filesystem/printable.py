"""Text from files of others, as a terminal may show it, without escape sequences; and lists of words in messages."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from stepmark.filesystem.cache_folder import with_addresses

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with control characters, marks of direction and lone surrogates escaped, and with runs' addresses."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], with_addresses(text))


def listed(words: Sequence[str], most: int = 8) -> str:
    """The words as an enumeration, of which only the first are named."""
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def printable_record(record: logging.LogRecord) -> bool:
    """A filter for loggers, which makes their messages printable."""
    record.msg, record.args = printable(record.getMessage()), ()
    return True


class PrintableOutput:
    """A stream that shows what is written to it as `printable` does."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, text: str) -> int:
        return int(self._inner.write(printable(text)))
