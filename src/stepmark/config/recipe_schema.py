"""A JSON schema of recipes, from which editors complete and check fields."""

from __future__ import annotations

import typing
from typing import Any

from stepmark.config.coercion import BOOL_TOO
from stepmark.config.data_arguments import DataArguments
from stepmark.config.dataset_mixture import SOURCE_FIELDS, WEIGHT
from stepmark.config.field_help import CHOICES, help_of
from stepmark.config.recipe import PARTS, all_fields

_TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    dict: "object",
    list: "array",
    type(None): "null",
}


def recipe_schema() -> dict[str, Any]:
    """The schema: every field with its types, choices, default, description and an example."""
    hints = {name: hint for part in PARTS for name, hint in typing.get_type_hints(part).items()}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Stepmark recipe",
        "type": "object",
        "additionalProperties": False,
        "properties": {name: _property(name, hints[name], default) for name, (_, default) in all_fields().items()},
    }


def accepted_types(name: str, hint: Any) -> list[Any]:
    """The types that a field accepts in a recipe."""
    types = [hint] if typing.get_origin(hint) in (None, list, dict) else [*typing.get_args(hint)]
    return [bool, *types] if name in BOOL_TOO and bool not in types else types


def _property(name: str, hint: Any, default: Any) -> dict[str, Any]:
    types = [_TYPES[typing.get_origin(kind) or kind] for kind in accepted_types(name, hint)]
    found: dict[str, Any] = {"type": types[0] if len(types) == 1 else types, "default": default}
    if name == "dataset_mixture":
        found["items"] = _source_schema()
    if name in CHOICES:
        found["enum"] = [*CHOICES[name]]
    described = help_of(name)
    if described is not None:
        found["description"] = f"{described.text}. Example: {name}: {described.example}"
    return found


def _source_schema() -> dict[str, Any]:
    """One source of a mixture."""
    hints = typing.get_type_hints(DataArguments)
    fields = {
        name: _property(name, hints[name], default)
        for name, (_, default) in all_fields().items()
        if name in SOURCE_FIELDS
    }
    weight = {"type": "number", "exclusiveMinimum": 0, "description": "its share of the samples, beside the others'"}
    return {
        "type": "object",
        "additionalProperties": False,
        "required": [WEIGHT],
        "properties": {WEIGHT: weight, **fields},
    }
