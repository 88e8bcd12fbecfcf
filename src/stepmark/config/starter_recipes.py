"""Commented recipes to begin with, as `stepmark init` writes them: `starters/`, with a line about each field."""

from __future__ import annotations

from pathlib import Path

from stepmark.config.recipe import all_fields

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
