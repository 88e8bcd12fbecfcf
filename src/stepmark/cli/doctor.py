"""`stepmark doctor [--recipe RECIPE.yaml] [--FIELD VALUE …] [--json]`"""

from __future__ import annotations

import argparse
import json

from stepmark.cli.recipe_fields import add_fields, recipe_of
from stepmark.config.recipe import all_fields

HELP = "check this machine for what would make a run fail"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipe", metavar="RECIPE.yaml", help="also check a recipe's fields, device and output_dir")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.usage = "%(prog)s [--recipe RECIPE.yaml] [--json] [--FIELD VALUE ...]"
    add_fields(parser)


def run(parsed: argparse.Namespace) -> int:
    """Prints what was found; returns 1 where something of it will make a run fail, else 0."""
    fields = [(name, value) for name in all_fields() if (value := getattr(parsed, name)) is not None]
    flags = [each for name, value in fields for each in (f"--{name}", *([value] if isinstance(value, str) else value))]
    recipe = recipe_of(parsed) if parsed.recipe is not None or flags else None
    from stepmark.preflight.doctor.examine import examine, to_json, to_text, will_fail

    findings = examine(recipe, parsed.recipe, flags)
    print(json.dumps(to_json(findings), indent=2) if parsed.json else to_text(findings))
    return int(will_fail(findings))
