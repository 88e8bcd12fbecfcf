"""A JSON schema of recipes, from which editors complete and check fields."""

from __future__ import annotations

from typing import Any

from stepmark.config.data_arguments import SOURCE_FIELDS, WEIGHT
from stepmark.config.recipe import all_fields


def recipe_schema() -> dict[str, Any]:
    """The schema: every field with its types, values, default, description and an example."""
    fields = {name: field.schema() for name, field in all_fields().items()}
    weight = {"type": "number", "exclusiveMinimum": 0, "description": "Share of the samples, relative to the others'."}
    source = {WEIGHT: weight, **{name: fields[name] for name in SOURCE_FIELDS}}
    fields["dataset_mixture"]["items"] = {**_object(source), "required": [WEIGHT]}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Stepmark recipe",
        **_object(fields),
    }


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}
