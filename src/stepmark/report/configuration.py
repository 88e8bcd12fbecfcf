"""The configuration of runs: what a recipe set, and what differs between runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from stepmark.config.recipe import all_fields
from stepmark.config.yaml_file import parse_yaml
from stepmark.recipe.used_recipe import USED_RECIPE
from stepmark.report import text
from stepmark.report.history import History, names
from stepmark.report.html_table import table

OF_THE_FOLDER = ("output_dir", "run_name", "resume_from_checkpoint")  # differ between runs and say nothing about them
FACTS = ("ranks", "mesh", "device", "device_model", "software")  # of the event "started"


def read_configuration(folder: Path) -> dict[str, Any]:
    """The recipe fields that a run was given; empty for a run without a recipe, as that of a custom Trainer."""
    try:
        content = parse_yaml((folder / USED_RECIPE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def configuration_table(histories: Sequence[History]) -> str:
    """One run: what its recipe sets, folded. Several: one row for each field or fact that is not the same in all."""
    if len(histories) == 1:
        return _of_one(histories[0])
    defaults = {name: field.default for name, field in all_fields().items()}
    given = [{**_facts(history), **read_configuration(history.folder)} for history in histories]
    fields = [name for name in dict.fromkeys(name for each in given for name in each) if name not in OF_THE_FOLDER]
    rows = []
    for name in fields:
        values = [_shown(each.get(name, defaults.get(name))) for each in given]
        if len(set(values)) > 1:
            rows.append([f"<code>{escape(name)}</code>", *(f"<code>{escape(value)}</code>" for value in values)])
    if not rows:
        return '<h2>Differences</h2><p class="soft">All recorded settings of these runs are the same.</p>'
    heads = ["Field", *names(histories)]
    return f"<h2>Differences</h2>{table('differences', heads, rows)}"


def _of_one(history: History) -> str:
    given = read_configuration(history.folder)
    if not given:
        return ""
    rows = [[f"<code>{escape(name)}</code>", f"<code>{escape(_shown(value))}</code>"] for name, value in given.items()]
    inner = table("configuration", ["Field", "Value"], rows)
    return (
        f"<details><summary>Configuration: {text.plural(len(rows), 'field')} of its recipe</summary>{inner}</details>"
    )


def _facts(history: History) -> dict[str, Any]:
    """Where the run trained; names of software as `software torch`."""
    started = history.started
    found = {name: started[name] for name in FACTS if name in started}
    software = found.pop("software", None)
    versions = software if isinstance(software, dict) else {}
    return {**found, **{f"software {name}": version for name, version in versions.items()}}


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    return text.NOTHING if value is None else json.dumps(value, default=str)
