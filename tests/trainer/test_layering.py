"""The Trainer is at the top of its package: nothing below it knows it, and there are no import cycles."""

from __future__ import annotations

import ast
from pathlib import Path

import stepmark.trainer

PACKAGE = Path(stepmark.trainer.__file__).parent
MODULES = {
    ".".join(("stepmark", "trainer", *path.relative_to(PACKAGE).with_suffix("").parts)): path
    for path in PACKAGE.rglob("*.py")
    if path.stem != "__init__"
}


def imports(path: Path) -> set[str]:
    """The package's modules that a file imports, for type checkers alone included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {name for name in named if name in MODULES}


def test_nothing_below_the_trainer_imports_it() -> None:
    assert "stepmark.trainer.training_loop" in MODULES
    importing = {name for name, path in MODULES.items() if "stepmark.trainer.trainer" in imports(path)}
    assert importing == {"stepmark.trainer.seq2seq"}  # a subclass of it


def test_there_are_no_cycles() -> None:
    below: dict[str, set[str]] = {name: imports(path) for name, path in MODULES.items()}
    while free := [name for name, others in below.items() if not others]:
        below = {name: others.difference(free) for name, others in below.items() if name not in free}
    assert not below
