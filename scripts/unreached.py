"""Public names, commands and options of the command line that no test of CI reaches: `python scripts/unreached.py`.

A static search of tests/. A test marked `prove` counts only in the files of `make test-optional`, a module of
tests/support only where a test that counts names it. A name is reached where it is imported from stepmark or is an
attribute of its module; a member where an attribute or a method has its name; an option in a file that also has its
command. Programs in strings count too. Exits with 1 if REASONS does not explain what is left.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

import stepmark.checkpoint
import stepmark.errors
import stepmark.sentence_transformers
import stepmark.trl
from stepmark.cli.main import build_parser

ROOT = Path(__file__).resolve().parents[1]
REASONS = {  # pattern: why no test names it
    "stepmark.errors.StepTimeout": "ends a process: tests/system/fault/test_hangs.py reads exit code and message",
    "stepmark.trl.[DKR]*": "made by kind in tests/support/trl_programs.py",
    "stepmark.sentence_transformers.S*": "made by kind in tests/support/sentence_programs.py",
    "stepmark * --do_train": "a flag of recipes that help leaves out: tests/config/test_recipe.py",
}
MODULES = (stepmark, stepmark.checkpoint, stepmark.sentence_transformers, stepmark.trl)
EXPORTS: dict[str, list[str]] = {
    **{each.__name__: [*each.__all__] for each in MODULES},
    "stepmark.errors": [name for name in vars(stepmark.errors) if name[0].isupper()],
    "stepmark.checkpoint.dcp": ["save", "async_save", "load"],
}
PROVE = "pytest.mark.prove"
MEMBERS = re.compile(r"^::: stepmark\.(\w+)\n    options:\n      members: \[(.+)\]$", re.MULTILINE)


class Uses:
    """What a file names: `module.name`, `.name` of what is imported, `any.name` of attributes and methods; words."""

    def __init__(self, nodes: list[ast.AST]) -> None:
        self.names, self.words, self.commands, self.modules = set[str](), set[str](), set[str](), set[str]()
        imports = [node.names for node in nodes if isinstance(node, ast.Import)]
        self.aliases = {each.asname: each.name for names in imports for each in names}
        for node in nodes:
            self.add(node)

    def add(self, node: ast.AST) -> None:
        if isinstance(node, ast.ImportFrom) and node.module:
            self.modules |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
            homes = (node.module.rpartition(".")[2], "") if node.module.startswith("stepmark") else ()
            self.names |= {f"{home}.{each.name}" for each in node.names for home in homes}
        elif isinstance(node, ast.Attribute):
            owner = self.aliases.get(ast.unparse(node.value), ast.unparse(node.value)).rpartition(".")[2]
            self.names |= {f"{owner}.{node.attr}", f"any.{node.attr}"}
        elif isinstance(node, ast.FunctionDef):
            self.names.add(f"any.{node.name}")
        elif isinstance(node, ast.List | ast.Tuple | ast.Call):
            first = (node.args if isinstance(node, ast.Call) else node.elts)[:1]
            self.commands |= {str(each.value).split(" ")[0] for each in first if isinstance(each, ast.Constant)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            self.words |= {word.partition("=")[0] for word in node.value.split()}
            self.commands |= set(re.findall(r"stepmark[\"', ]+(\w+)", node.value))
            self.modules |= set(re.findall(r"tests\.[\w.]+", node.value))
            with suppress(SyntaxError):  # part of a program, or prose
                for inner in ast.walk(ast.parse(node.value)) if "import " in node.value else ():
                    self.add(inner)


def counted(path: Path, optional: str) -> list[ast.AST]:
    """The nodes of a file, without docstrings and without tests that CI does not run."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    if str(path.relative_to(ROOT)) not in optional:
        if any(re.match("pytestmark = .*mark.prove", ast.unparse(each)) for each in body):
            return []
        body = [each for each in body if PROVE not in map(ast.unparse, getattr(each, "decorator_list", ()))]
    nodes = [node for statement in body for node in ast.walk(statement)]
    prose = {node.value for node in nodes if isinstance(node, ast.Expr)}
    return [node for node in nodes if not isinstance(node, ast.Constant) or node not in prose]


def reached() -> list[Uses]:
    """What each file of tests/ names that CI runs."""
    optional = re.findall(r"^NEEDING_OPTIONAL := (.*?[^\\])$", (ROOT / "Makefile").read_text(), re.M | re.S)[0]
    waiting, found = set(ROOT.glob("tests/**/test_*.py")), dict[Path, Uses]()
    while waiting:
        path = waiting.pop()
        found[path] = Uses(counted(path, optional))
        modules = {ROOT.joinpath(*name.split(".")).with_suffix(".py") for name in found[path].modules}
        waiting |= {each for each in modules if each.is_file() and ROOT / "tests" in each.parents} - found.keys()
    return [*found.values()]


def unreached() -> Iterator[str]:
    """What no test of CI names: `module.name`, `stepmark.Class.member`, `stepmark command` alone or with an option."""
    uses = reached()
    names = set[str]().union(*(each.names for each in uses))
    for module, exported in EXPORTS.items():
        home = module.rpartition(".")[2]
        alone = {} if home == "dcp" else {name: f".{stepmark._RENAMED.get(name, name)}" for name in exported}
        yield from (f"{module}.{name}" for name in exported if not names & {f"{home}.{name}", alone.get(name)})
    for kind, members in MEMBERS.findall((ROOT / "docs" / "reference" / "python.md").read_text()):
        yield from (f"stepmark.{kind}.{name}" for name in members.split(", ") if f"any.{name}" not in names)
    (choices,) = (each.choices for each in build_parser()._actions if isinstance(each, argparse._SubParsersAction))
    for command, parser in choices.items():
        words = set[str]().union(*(each.words | {"--help"} for each in uses if command in each.commands))
        yield from () if words else (f"stepmark {command}",)
        fields = [group for group in parser._action_groups if (group.title or "").startswith("recipe fields")]
        known = {action.dest for group in fields for action in group._group_actions} | {"traceback"}  # one for all
        options = (each.option_strings for each in parser._actions if each.option_strings and each.dest not in known)
        yield from (f"stepmark {command} {each[-1]}" for each in options if not words & {*each})


if __name__ == "__main__":
    raise SystemExit("\n".join(each for each in unreached() if not any(fnmatch(each, key) for key in REASONS)) or 0)
