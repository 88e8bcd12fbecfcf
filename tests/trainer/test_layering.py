"""The rooms of trainer/ have an order, with the Trainer at the top, and no two modules import each other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import stepmark.trainer

PACKAGE = Path(stepmark.trainer.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in PACKAGE.rglob("*.py")
    if path.stem != "__init__"
}
# Each imports from itself and from what stands before it; what stands in one line does not import each other.
ORDER = [
    {"training_arguments"},
    {"compat"},
    {"run_folder"},
    {"run", "loaders"},
    {"setup"},
    {"telemetry"},
    {"callbacks"},
    {"evaluation", "resume", "interruption"},
    {"training_loop"},
    {"trainer"},
    {"seq2seq"},
]


def imports(module: str) -> set[str]:
    """The package's modules that a module imports, for type checkers alone included."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    named = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    found = {name.removeprefix("stepmark.trainer.") for name in named if name.startswith("stepmark.trainer.")}
    return found & MODULES.keys()


def level(module: str) -> int:
    return next(index for index, rooms in enumerate(ORDER) if module.partition(".")[0] in rooms)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_room_imports_from_earlier_ones(module: str) -> None:
    room = module.partition(".")[0]
    others = {other for other in imports(module) if other.partition(".")[0] != room}
    assert not {other for other in others if level(other) >= level(module)}


def test_there_are_no_cycles() -> None:
    below: dict[str, set[str]] = {name: imports(name) for name in MODULES}
    while free := [name for name, others in below.items() if not others]:
        below = {name: others.difference(free) for name, others in below.items() if name not in free}
    assert not below
