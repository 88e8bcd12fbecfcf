"""Hooks of mkdocs: pages of the documentation site that are made from the code, and links that leave `docs/`.

`make docs` builds the site. The reference of fields, commands and errors is made of what the command line itself prints
and of the docstrings, so that it cannot differ from them.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import runpy
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from stepmark import errors
from stepmark.cli.main import COMMANDS, build_parser
from stepmark.config.fields import REFERENCE
from stepmark.config.recipe import all_fields, sections
from stepmark.config.refusals import refusals
from stepmark.config.unknown_fields import OF_RECIPES

ROOT = Path(__file__).resolve().parents[1]
TABLE = re.compile(r"<!-- table ([\w-]+) -->")
# What the search shows first: answers, then guides, and what is looked up or only explains something last.
BOOSTS = {
    "troubleshooting": 8,
    "tutorials/": 4,
    "faq": 3,
    "start/": 2,
    "parallelism": 6,
    "sharding": 6,
    "pipelines": 6,
    "experts": 6,
    "object-storage": 6,
    "drill": 6,
    "checkpoint-format": 3,
    "data": 3,
    "glossary": 0.2,
    "reference/source-map": 0.05,
    "reference/fields": 4,
    "reference/": 0.5,
    "decisions/": 0.1,
    "tables": 0.1,
    "proof": 0.1,
    "architecture": 0.3,
}
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]
EXAMPLE_PATH = re.compile(r"(?<!\[)`(examples/[\w./-]+\w)`")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)((?:#[^)]*)?)\)")


OLD_NAMES = "reference/old-names.md"
MADE_OF = {"src/stepmark/config/refusals.csv": OLD_NAMES}  # links to these files lead to the pages made of them
ORIGINS = {
    "elsewhere": "Fields and keywords of older versions and of other tools",
    "gone": "Commands, options and values that are gone",
    "transformers": "Arguments of transformers that a recipe lacks",
    "run_clm": "Arguments of run_clm",
    "optim": "Values of optim",
    "optim_args": "Options in optim_args",
    "fsdp_config": "Options in fsdp_config",
    "export": "Imports of other packages",
    "hook": "Methods of transformers' Trainer that are never called",
}
PUBLIC_NAME = re.compile(r"^::: (stepmark\.[\w.]+)\n(?:    .*\n)*", re.MULTILINE)
EXAMPLE = re.compile(r"^# (stepmark\.[\w.]+)\n(.*?)(?=^# stepmark\.|\Z)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are made from the code."""
    pages = {
        "reference/fields.md": fields_page(),
        "reference/commands.md": commands_page(),
        "reference/errors.md": errors_page(),
        OLD_NAMES: old_names_page(),
        "reference/source-map.md": source_map(),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_post_build(config: Any) -> None:
    """Raises PluginError unless the site has every place that an error about a field names."""
    folder = Path(config["site_dir"]) / REFERENCE.removeprefix(config["site_url"])
    places = {"fields": set(all_fields()), "old-names": {name for origin in OF_RECIPES for name in refusals(origin)}}
    for page, names in places.items():
        anchors = set(re.findall(r'id="(\w+)"', (folder / page / "index.html").read_text(encoding="utf-8")))
        if names - anchors:
            raise PluginError(f"reference/{page} lacks {', '.join(sorted(names - anchors))}, which errors name")


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Puts the data of docs/data/NAME.json in place of `<!-- table NAME -->`; assets/tables.js shows them."""
    return TABLE.sub(lambda found: _table(found[1]), html)


def with_examples(markdown: str) -> str:
    """Puts the example of each public name, a part of examples/public_names.py, below its reference."""
    examples = dict(EXAMPLE.findall((ROOT / "examples" / "public_names.py").read_text(encoding="utf-8")))
    return PUBLIC_NAME.sub(lambda entry: f"{entry[0]}\n```python\n{examples[entry[1]].strip()}\n```\n", markdown + "\n")


def _table(name: str) -> str:
    data = json.loads((ROOT / "docs" / "data" / f"{name}.json").read_text(encoding="utf-8"))
    text = json.dumps(data, ensure_ascii=False).replace("</", "<\\/")
    return f'<div class="data-table"><script type="application/json">{text}</script></div>'


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns links to files that the site does not have, and paths of examples, into links to the repository."""
    if page.file.src_uri == "reference/python.md":
        markdown = with_examples(markdown)
    here = PurePosixPath(page.file.src_uri).parent
    boost = next((value for start, value in BOOSTS.items() if page.file.src_uri.startswith(start)), 1)
    page.meta.setdefault("search", {}).setdefault("boost", boost)

    def replaced(link: re.Match[str]) -> str:
        image, text, target, _ = link.groups()
        if files.get_file_from_path(_normal(here / target)) is not None:
            return link[0]
        within = _normal(here / target)
        if f"{within}/README.md" in files.src_uris:
            return f"{image}[{text}]({target}/README.md)"
        path = (ROOT / "docs" / here / target).resolve()
        made = path.is_relative_to(ROOT) and MADE_OF.get(path.relative_to(ROOT).as_posix())
        if made:
            return f"[{text}]({'../' * len(here.parts)}{made})"
        return f"{image}[{text}]({in_repository(path)})" if path.exists() else link[0]

    return EXAMPLE_PATH.sub(
        lambda found: f"[{found[0]}]({in_repository(ROOT / found[1])})", LINK.sub(replaced, markdown)
    )


def in_repository(path: Path) -> str:
    """The address of a file or folder that an installed package does not have. Raises PluginError if nothing has it."""
    if not path.exists():
        raise PluginError(f"{path} does not exist, and a page names it")
    return f"{SOURCE}/{'tree' if path.is_dir() else 'blob'}/main/{path.relative_to(ROOT).as_posix()}"


def _normal(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts and parts[-1] != "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def fields_page() -> str:
    """Every recipe field in its group: type, default, what it does, and an example."""
    lines = ["# Recipe fields", ""]
    lines += ["Every field can be given in a recipe or as a flag, which overrides it. Unknown fields are rejected.", ""]
    for title, fields in sections().items():
        lines += [
            f"## {title.capitalize()}",
            "",
            "| field | meaning | type | default | example |",
            "| --- | --- | --- | --- | --- |",
        ]
        for field in fields:
            choices = f" ({', '.join(field.choices)})" if field.choices else ""
            text = f"{field.help.text}{choices}. {field.help.more}".strip()
            default = field.help.default or _code(field.default_text)
            cells = (_cell(text), _code(field.type_name), default, _code(field.help.example))
            lines.append(f"| {_anchored(field.name)} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def commands_page() -> str:
    """Every command with its arguments; recipe fields have a page of their own."""
    parser = build_parser()
    choices = next(each for each in parser._actions if isinstance(each, argparse._SubParsersAction)).choices
    lines = ["# Commands", ""]
    for name, module in COMMANDS.items():
        command = choices[name]
        lines += [f"## stepmark {name}", "", f"{module.HELP[0].upper()}{module.HELP[1:]}.", ""]
        lines += ["```text", command.format_usage().strip(), "```", "", "| argument | |", "| --- | --- |"]
        for group in command._action_groups:
            if (group.title or "").startswith("recipe fields"):
                continue
            lines += [f"| {_argument(each)} | {_cell(_help(command, each))} |" for each in _shown(group)]
        if any((group.title or "").startswith("recipe fields") for group in command._action_groups):
            lines += ["", "It also takes every [recipe field](fields.md) as a flag."]
        lines.append("")
    return "\n".join(lines)


def source_map() -> str:
    """Every module with the first sentence of its docstring: scripts/source_map.py."""
    made: str = runpy.run_path(str(ROOT / "scripts" / "source_map.py"))["page"]()
    return made


def errors_page() -> str:
    """The classes of errors with their exit codes."""
    lines = ["# Errors and exit codes", "", (inspect.getdoc(errors) or "").strip(), ""]
    lines += ["| class | a kind of | exit code | |", "| --- | --- | --- | --- |"]
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.StepmarkError):
            base = next(each.__name__ for each in kind.__bases__)
            text = " ".join((kind.__doc__ or "").split())
            lines.append(f"| `{name}` | `{base}` | {kind.exit_code} | {_cell(text)} |")
    lines += [
        "",
        "All exit codes, also those of interrupted runs and of launchers: [running](../running.md#exit-codes).",
    ]
    return "\n".join(lines)


def old_names_page() -> str:
    """Names of other tools, and what to use instead, by where they come from."""
    lines = ["# Old names", "", "Each is an error that says what to use instead.", ""]
    for origin, title in ORIGINS.items():
        found = refusals(origin).items()
        rows = [f"| {_anchored(name, origin in OF_RECIPES)} | {_cell(instead)} |" for name, instead in found]
        lines += [f"## {title}", "", "| name | instead |", "| --- | --- |", *rows, ""]
    return "\n".join(lines)


def _anchored(name: str, anchored: bool = True) -> str:
    """A name to which links lead: those at the end of errors."""
    return f"[`{name}`](#{name}){{#{name}}}" if anchored else f"`{name}`"


def _shown(group: argparse._ArgumentGroup) -> list[argparse.Action]:
    """Without options that are accepted and that help leaves out."""
    return [each for each in group._group_actions if each.help != argparse.SUPPRESS]


def _help(command: argparse.ArgumentParser, action: argparse.Action) -> str:
    return command._get_formatter()._expand_help(action) if action.help else ""


def _argument(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    value = action.metavar or ("" if action.nargs == 0 or not names else action.dest.upper())
    listed = action.choices and action.metavar is None
    shown = "{" + ",".join(map(str, action.choices or ())) + "}" if listed else value
    shown = " ".join(shown) if isinstance(shown, tuple) else shown
    return f"{names} {_code(shown) if shown else ''}".strip() if names else _code(action.metavar or action.dest)


def _code(text: object) -> str:
    return f"`{str(text).replace(' | ', ' or ')}`"  # a bar ends the cell of a table, also in code


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
