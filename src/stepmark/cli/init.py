"""`stepmark init [RECIPE.yaml] [--kind scratch|model|chat|preference]`: recipes of `starters/`, with comments."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from stepmark.config.recipe import all_fields, recipe_schema
from stepmark.errors import UsageError
from stepmark.filesystem.files import make_folder, replace_file, write_file

HELP = "write a commented starter recipe"
SCHEMA = "recipe.schema.json"
KINDS = ("scratch", "model", "chat", "preference")
WIDTH = 58  # of a field with its value, after which its comment begins


def starter_recipe(kind: str, schema: str) -> str:
    """The text of a recipe of one of KINDS; its first line names the file of the JSON schema for editors."""
    files = [Path(__file__).parent / "starters" / f"{name}.yaml" for name in (kind, "common")]
    lines = [f"# yaml-language-server: $schema={schema}"]
    for line in "".join(file.read_text(encoding="utf-8") for file in files).splitlines():
        field = all_fields().get(line.partition(":")[0])
        lines.append(f"{line:<{WIDTH}}# {field.help.text}" if field else line)
    return "\n".join(lines) + "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    where = f"file to write (default: recipe.yaml), next to it {SCHEMA}, from which editors complete"
    add("recipe", nargs="?", metavar="RECIPE.yaml", type=Path, default=Path("recipe.yaml"), help=where)
    kinds = "scratch: a new model (default); model: continued pretraining; chat: fine-tuning on conversations; "
    kinds += "preference: DPO on pairs of answers"
    add("--kind", choices=sorted(KINDS), default="scratch", help=kinds)


def run(parsed: argparse.Namespace) -> int:
    """Writes the recipe and the schema, and returns 0. Raises UsageError if the recipe exists or cannot be written."""
    path: Path = parsed.recipe
    try:
        make_folder(path.parent)
        write_file(path, starter_recipe(parsed.kind, SCHEMA).encode(), durable=False)
        schema = json.dumps(recipe_schema(), indent=2) + "\n"
        replace_file(path.parent / SCHEMA, schema.encode())
    except FileExistsError as error:
        raise UsageError(f"{path} exists; name another file, or move it away") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; name another file") from error
    takes = " (about 20 minutes on a laptop, 2 with --max_steps 100)" if parsed.kind == "scratch" else ""
    first = "set model_name_or_path and train_file in it, then " if parsed.kind in ("model", "chat") else ""
    print(f"wrote {path}; next: {first}stepmark train {path}{takes}")
    return 0
