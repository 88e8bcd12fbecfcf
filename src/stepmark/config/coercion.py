"""Converts values of recipe fields, from YAML, flags or Python, to the types that the dataclasses declare."""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from collections.abc import Mapping
from typing import Any

from stepmark.errors import UsageError

# Fields that may be true or false besides what they declare, since HfArgumentParser reads no union with bool.
BOOL_TOO = ("resume_from_checkpoint", "compile_cache")

_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a mapping",
    list: "a list",
}


def convert(name: str, value: Any, annotation: Any) -> Any:
    """Returns `value` as the type `annotation`. A whole number is accepted as a number, and so is text such as "1e-4".

    Raises UsageError that names the field.
    """
    accepted = list(typing.get_args(annotation)) if _is_union(annotation) else [annotation]
    accepted += [bool] if name in BOOL_TOO else []
    if value is None and type(None) in accepted:
        return None
    for kind in accepted:
        origin = typing.get_origin(kind) or kind
        if origin is float and isinstance(value, (int, str)) and not isinstance(value, bool):
            with_number = _number(value)
            if with_number is not None:
                return with_number
        if origin is int and isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, origin) and (origin is bool or not isinstance(value, bool)):
            return value
    wanted = " or ".join(_NAMES.get(typing.get_origin(kind) or kind, "nothing") for kind in accepted)
    raise UsageError(f"{name}: should be {wanted}, and is {value!r}")


def convert_all(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `values` as the types that the dataclass `kind` declares for them. Text with `~` in front is a path."""
    hints = typing.get_type_hints(kind)
    converted = {name: convert(name, value, hints[name]) for name, value in values.items()}
    return {name: os.path.expanduser(value) if isinstance(value, str) else value for name, value in converted.items()}


def field_names(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _number(value: int | str) -> float | None:
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
