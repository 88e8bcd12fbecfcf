"""The arguments of commands that read a recipe: its path, and every field as a flag that overrides it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from stepmark.config.recipe import DO_TRAIN, Recipe, all_fields, is_switch, read_recipe, sections
from stepmark.config.unknown_fields import unknown_fields
from stepmark.launch.rank_count import int_or_auto
from stepmark.liveness import console


def add_run_arguments(parser: argparse.ArgumentParser, *, restarts: bool = False) -> None:
    """Adds how many ranks to start, and the recipe. `restarts`: the command may start them again."""
    nproc = "start N ranks on this machine; auto: one for each device, or core of a CPU"
    parser.add_argument("--nproc", type=int_or_auto, metavar="N", help=nproc)
    if restarts:
        least = "with --max_restarts, go on with fewer ranks where devices are lost, K at least"
        parser.add_argument("--min_nproc", type=int, metavar="K", help=least)
    add_recipe_arguments(parser)


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the path of a recipe, and its fields."""
    parser.add_argument("recipe", nargs="?", metavar="RECIPE.yaml", help="fields and their values; flags override it")
    parser.usage = "%(prog)s [RECIPE.yaml] [--nproc N] [--FIELD VALUE ...]"
    add_fields(parser)


def add_fields(parser: argparse.ArgumentParser) -> None:
    """Adds a recipe's fields, in groups with their descriptions."""
    parser.set_defaults(explain_unknown=_explain_unknown)
    for title, fields in sections().items():
        group = parser.add_argument_group(f"recipe fields: {title}")
        for field in fields:
            several = {"nargs": "+"} if "list" in field.type_name else {}
            counted: dict[str, Any] = {"nargs": "?", "const": "true"} if is_switch(field.name) else several
            metavar = field.type_name.replace(" | None", "").replace(" | ", "|").upper()
            names = [f"--{field.name}", *(["--accept-changes"] if field.name == "accept_changes" else [])]
            choices = f"{', '.join(field.choices)}; " if field.choices else ""
            told = f"{field.help.text} ({choices}default: {field.default_text}; example: {field.help.example})"
            group.add_argument(*names, metavar=metavar, help=told.replace("%", "%%"), **counted)
    parser.add_argument(f"--{DO_TRAIN}", nargs="?", const="true", help=argparse.SUPPRESS)


def _explain_unknown(argument: str) -> str:
    """The error for an unknown field or a second positional argument."""
    if not argument.startswith("--"):
        return f"{argument}: unrecognized argument; pass one recipe, and fields as --FIELD VALUE"
    return unknown_fields([argument[2:].split("=", 1)[0]], all_fields())


def recipe_of(parsed: argparse.Namespace) -> Recipe:
    """The recipe, overridden by the flags; the path may come after a flag without a value, or with several. What is
    printed from now on has its `log_format`. Raises UsageError that names the field."""
    given = {n: value for n in (*all_fields(), DO_TRAIN) if (value := getattr(parsed, n)) is not None}
    for name, value in given.items():
        values = value if isinstance(value, list) else [value]
        if parsed.recipe is None and (is_switch(name) or values[1:]) and values[-1].endswith((".yaml", ".yml")):
            *values, parsed.recipe = values
        elements = (each if each.isdecimal() else json.dumps(each, ensure_ascii=False) for each in values)
        given[name] = f"[{', '.join(elements)}]" if values[1:] else [*values, "true"][0]
    recipe = read_recipe(parsed.recipe, given)
    console.install(recipe.training.log_format, launcher=getattr(parsed, "nproc", None) is not None)
    return recipe
