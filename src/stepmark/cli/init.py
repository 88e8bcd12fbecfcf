"""`stepmark init [RECIPE.yaml] [--kind scratch|model|chat]`"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from stepmark.config.starter_recipes import KINDS, starter_recipe
from stepmark.errors import UsageError

HELP = "write a commented recipe to begin with"
SCHEMA = "recipe.schema.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe",
        nargs="?",
        metavar="RECIPE.yaml",
        type=Path,
        default=Path("recipe.yaml"),
        help=f"the file to write (default: recipe.yaml); {SCHEMA}, from which editors complete, goes beside it",
    )
    parser.add_argument(
        "--kind",
        choices=sorted(KINDS),
        default="scratch",
        help="scratch: a new model (default); model: one whose training continues; chat: one that is fine-tuned on "
        "conversations",
    )


def run(parsed: argparse.Namespace) -> int:
    """Writes the recipe and the schema, and returns 0. Raises UsageError if the recipe exists or cannot be written."""
    from stepmark.config.recipe import recipe_schema

    path: Path = parsed.recipe
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(starter_recipe(parsed.kind, SCHEMA))
        schema = json.dumps(recipe_schema(), indent=2) + "\n"
        (path.parent / SCHEMA).write_text(schema, encoding="utf-8")
    except FileExistsError as error:
        raise UsageError(f"{path} exists; name another file, or move it away") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; name another file") from error
    print(f"wrote {path}; next: stepmark train {path}")
    return 0
