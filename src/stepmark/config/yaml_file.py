"""YAML 1.2, in which `no` is a word and `1e-4` a number; duplicate keys are an error."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from stepmark.errors import UsageError


class _CoreConstructor(SafeConstructor):
    """Builds the types of the core schema, which has no dates."""


for _tag in ("timestamp", "value"):
    _CoreConstructor.add_constructor(f"tag:yaml.org,2002:{_tag}", SafeConstructor.construct_yaml_str)


def parse_yaml(text: str) -> Any:
    """Returns the value of a YAML document. Raises ValueError, in one line that says where, for invalid YAML."""
    try:
        return _yaml().load(text)
    except MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark is not None else ""
        raise ValueError(f"{line}{error.problem or error}") from error
    except (YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error


def format_yaml(values: Mapping[str, Any]) -> str:
    """Returns a YAML document of plain values, one key a line, in their order."""
    stream = io.StringIO()
    _yaml().dump(dict(values), stream)
    return stream.getvalue()


def _yaml() -> Any:
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.Constructor = _CoreConstructor
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    return yaml


def parse_options(field: str, text: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Parses `"momentum=0.9,nesterov=true"`, whose values are YAML, or a JSON object into a mapping; a mapping is
    copied. `field` is for error messages."""
    if not isinstance(text, str):
        return dict(text or {})
    if text.lstrip().startswith("{"):
        try:
            return dict(json.loads(text))
        except ValueError as error:
            raise UsageError(f"{field}: is not a valid JSON object: {error}") from error
    options: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, separator, value = part.partition("=")
        if not separator or key.strip() in options:
            raise UsageError(f"{field}: should be name=value pairs, each name once and commas between; has {part!r}")
        try:
            options[key.strip()] = parse_yaml(value)
        except ValueError as error:
            raise UsageError(f"{field}: cannot read {part!r}: {error}") from error
    return options
