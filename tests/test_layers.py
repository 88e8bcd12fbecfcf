"""The folders are the stages that data passes through, and a folder imports from earlier ones only."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import stepmark

SOURCE = Path(stepmark.__file__).parent
ORDER = [
    "errors",
    "filesystem",
    "config",
    "launch",
    "sharding",
    "runtime",
    "data",
    "optim",
    "checkpoint",
    "parallel",
    "training",
    "interchange",
    "evaluation",
    "trainer",
    "recipe",
    "watcher",
    "report",
    "cli",
]
FILES = sorted(path for path in SOURCE.rglob("*.py") if path.parent != SOURCE or path.stem == "errors")


def imported(path: Path) -> Iterator[str]:
    """Names of the modules that a file imports, in full, but for those that only a type checker reads."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    package = ["stepmark", *path.relative_to(SOURCE).with_suffix("").parts][:-1]
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def stage(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "stepmark" and len(parts) > 1 and parts[1] in ORDER else None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_come_from_earlier_stages(path: Path) -> None:
    mine = ORDER.index(path.relative_to(SOURCE).with_suffix("").parts[0])
    later = {name for name in imported(path) if (found := stage(name)) is not None and ORDER.index(found) > mine}
    assert not later


def test_torch_xla_has_one_door() -> None:
    users = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if any(name.split(".")[0] == "torch_xla" for name in imported(path))
    }
    assert users == {"runtime/xla.py"}


@pytest.mark.parametrize(
    ("code", "kept_out"),
    [
        ("import stepmark", {"torch", "transformers", "datasets", "torch_xla", "yaml", "rich"}),
        ("from stepmark.cli.main import build_parser; build_parser()", {"torch", "transformers", "datasets"}),
        ("import stepmark.launch.supervisor", {"torch", "transformers", "torch_xla"}),
        ("import stepmark.report.write", {"torch", "transformers", "numpy", "matplotlib"}),
    ],
)
def test_what_is_quick_stays_quick(code: str, kept_out: set[str]) -> None:
    """Importing torch alone takes seconds; help and the supervisor do without."""
    asked = f"{code}; import sys; print(' '.join(sys.modules))"
    told = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert not kept_out & set(told.stdout.split())
