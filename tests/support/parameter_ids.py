"""Readable names for the parameters of tests, where pytest would number them: `options0`."""

from __future__ import annotations

from collections.abc import Mapping

LONGEST = 60  # characters; a longer value keeps pytest's name


def parameter_id(value: object) -> str | None:
    """`tp=2, sequence=True` for a dict, `2, 4` for a list, and types by name; None for what pytest names well and for
    what is long or differs between processes."""
    if isinstance(value, bytes):
        return "bytes"  # compressed ones may hold the time, and all processes need the same names
    if isinstance(value, Mapping):
        words = ", ".join(f"{key}={in_words(item)}" for key, item in value.items())
    elif isinstance(value, list | tuple):
        words = ", ".join(map(in_words, value))
    elif isinstance(value, set | frozenset):
        words = ", ".join(sorted(map(in_words, value)))
    elif type(value).__name__ in ("dtype", "UnionType", "GenericAlias"):
        return str(value).removeprefix("torch.")
    else:
        return None
    words = words or "empty"
    named = len(words) <= LONGEST and words.isascii() and words.isprintable() and " at 0x" not in words
    return words if named else None


def in_words(value: object) -> str:
    return parameter_id(value) or str(getattr(value, "__name__", value))
