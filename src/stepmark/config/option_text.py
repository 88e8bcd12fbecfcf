"""Options of a field that were given as text, as flags do."""

from __future__ import annotations

import json
from typing import Any

from stepmark.config.yaml_file import parse_yaml
from stepmark.errors import UsageError


def parse_options(field: str, text: str) -> dict[str, Any]:
    """Parses `"momentum=0.9,nesterov=true"`, whose values are YAML, or a JSON object into a mapping. `field` is for
    error messages."""
    if text.lstrip().startswith("{"):
        return _parse_object(field, text)
    options: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, separator, value = part.partition("=")
        if not separator:
            raise UsageError(f"{field}: should be name=value pairs with commas between, and has {part!r}")
        try:
            options[key.strip()] = parse_yaml(value)
        except ValueError as error:
            raise UsageError(f"{field}: cannot read {part!r}: {error}") from error
    return options


def _parse_object(field: str, text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except ValueError as error:
        raise UsageError(f"{field}: is not a valid JSON object: {error}") from error
