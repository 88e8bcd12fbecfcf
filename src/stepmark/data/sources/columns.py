"""Which column of a table holds the texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepmark.errors import DataError, UsageError


def choose_column(columns: Sequence[str], strings: Sequence[str], wanted: str | None, where: str) -> str:
    """The column of texts: `wanted`, else `text`, else the only one that holds strings.

    Raises UsageError that lists the columns if there is none, or more than one.
    """
    listed = ", ".join(columns) or "none"
    if wanted is not None:
        if wanted not in columns:
            raise UsageError(f"text_column: {where} has no column {wanted!r}; its columns are {listed}")
        return wanted
    if "text" in columns:
        return "text"
    if not strings:
        raise UsageError(
            f"text_column: {where} has no column of strings; its columns are {listed}; conversations are "
            "read with messages_column"
        )
    if len(strings) > 1:
        raise UsageError(
            f"text_column: {where} has {len(strings)} columns of strings, of which one can be trained on: set"
            f" text_column to one of {', '.join(strings)}; for conversations and instructions set messages_column"
        )
    return strings[0]


def describe_columns(chosen: str, columns: Sequence[str]) -> str:
    """What is read of a table, and what is not."""
    others = ", ".join(column for column in columns if column != chosen)
    return f"column {chosen!r}" + (f" (not read: {others})" if others else "")


def text_of(value: Any, where: str, column: str) -> str | None:
    """`value` as text: a string, or None where there is none. Raises DataError for anything else."""
    if value is None or isinstance(value, str):
        return value
    raise DataError(f"{where}: column {column!r} holds {type(value).__name__}, not text; choose another text_column")
