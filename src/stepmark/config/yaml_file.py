"""YAML as a recipe writer means it: the core schema of YAML 1.2.

PyYAML reads YAML 1.1, where `no` is false and `1e-4` is text; here `eval_strategy: no` is the word, and `1e-4` a
number. A key that stands twice in a mapping is an error instead of the last one winning.
"""

from __future__ import annotations

import re
from typing import Any

import yaml


class _CoreLoader(yaml.SafeLoader):
    """SafeLoader with the plain scalars of YAML 1.2."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.value in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key_node.value} is given twice", key_node.start_mark
                )
            keys.add(str(key_node.value))
        return super().construct_mapping(node, deep)


_CoreLoader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"(?:~|null|Null|NULL|)", ["~", "n", "N", ""]),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", list("-+0123456789")),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))", list("-+.")),
    ("merge", r"<<", ["<"]),
):
    _CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"{_pattern}\Z"), _first)


def parse_yaml(text: str) -> Any:
    """The value of a YAML document. Raises ValueError, in one line that says where, for what is none."""
    try:
        return yaml.load(text, Loader=_CoreLoader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark is not None else ""
        raise ValueError(f"{line}{error.problem or error}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error
