"""The arguments of commands that read a recipe: its path, and every field as a flag that overrides it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from stepmark.config.field_help import FIELD_HELP, help_of
from stepmark.config.recipe import DO_TRAIN, Recipe, all_fields, is_switch, read_recipe
from stepmark.config.refusals import unknown_field
from stepmark.liveness import console


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds how many ranks to start."""
    parser.add_argument("--nproc", type=int, metavar="N", help="start N ranks on this machine")


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the path of a recipe, and its fields in groups with their descriptions."""
    parser.add_argument("recipe", nargs="?", metavar="RECIPE.yaml", help="fields and their values; flags override it")
    parser.usage = "%(prog)s [RECIPE.yaml] [--nproc N] [--FIELD VALUE ...]"
    described = {name for fields in FIELD_HELP.values() for name in fields}
    groups = [*FIELD_HELP.items(), ("other", [name for name in all_fields() if name not in described])]
    for title, names in groups:
        if names:
            _add_fields(parser.add_argument_group(f"recipe fields: {title}"), names)
    parser.add_argument(f"--{DO_TRAIN}", nargs="?", const="true", help=argparse.SUPPRESS)


def _add_fields(group: argparse._ArgumentGroup, names: Iterable[str]) -> None:
    known = all_fields()
    for name in names:
        kind, default = known[name]
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if is_switch(name) else {}
        group.add_argument(f"--{name}", metavar=_metavar(kind), help=_help(name, default), **switch)


def _metavar(kind: str) -> str:
    return kind.replace(" | None", "").replace(" | ", "|").upper()


def _help(name: str, default: object) -> str:
    described = help_of(name)
    value = "unset" if default is None else str(default).lower() if isinstance(default, bool) else f"{default}"
    example = f"; example: {described.example}" if described else ""
    line = f"{described.text} (default: {value}{example})" if described else f"default: {value}"
    return line.replace("%", "%%")


def explain_unknown_argument(argument: str) -> str:
    """The error for an unknown field or a second positional argument."""
    if not argument.startswith("--"):
        return f"{argument}: unrecognized argument; pass one recipe, and fields as --FIELD VALUE"
    return unknown_field(argument[2:].split("=", 1)[0], all_fields())


def recipe_of(parsed: argparse.Namespace) -> Recipe:
    """The recipe, overridden by the flags; the path may come after a flag without a value. What is printed from now on
    has its `log_format`. Raises UsageError that names the field."""
    given = {n: value for n in (*all_fields(), DO_TRAIN) if (value := getattr(parsed, n)) is not None}
    for name, value in given.items():
        if parsed.recipe is None and is_switch(name) and value.endswith((".yaml", ".yml")):
            parsed.recipe, given[name] = value, "true"
    recipe = read_recipe(parsed.recipe, given)
    console.install(recipe.training.log_format, launcher=getattr(parsed, "nproc", None) is not None)
    return recipe
