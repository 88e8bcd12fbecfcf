"""The order of the packages: what a package may import, and that no two modules import each other."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import stepmark

SOURCE = Path(stepmark.__file__).parent
ORDER = [
    "errors",
    "filesystem",
    "config",
    "liveness",
    "launch",
    "sharding",
    "runtime",
    "data",
    "checkpoint",
    "tensor_files",
    "parallel",
    "training",
    "model_folder",
    "evaluation",
    "trainer",
    "recipe",
    "preflight",
    "watcher",
    "report",
    "interchange",
    "cli",
]
INNER_ORDER: dict[str, list[list[str]]] = tomllib.loads(Path(__file__).with_name("inner_order.toml").read_text())
FORMAT_MAY_IMPORT = (
    "stepmark.errors",
    "stepmark.filesystem",
    "stepmark.liveness.gc_pause",  # pauses the collection of garbage while many small objects are made
    "stepmark.sharding",
    "stepmark.checkpoint.format",
)
FILES = sorted(path for path in SOURCE.rglob("*.py") if path.parent != SOURCE or path.stem == "errors")


def module_of(path: Path) -> str:
    parts = ["stepmark", *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


@cache
def imported(path: Path, *, typing: bool = True) -> tuple[str, ...]:
    """Full names of what a file imports, at any place in it; without `typing`, not what only a type checker reads."""
    return tuple(_imported(path, typing=typing))


def _imported(path: Path, *, typing: bool) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    package = ["stepmark", *path.relative_to(SOURCE).with_suffix("").parts][:-1]
    for node in ast.walk(tree):
        if not typing and id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imported_modules(path: Path, *, typing: bool) -> set[str]:
    """The modules of ours that a file imports from."""
    found = set()
    for name in imported(path, typing=typing):
        module = name if name in MODULES else name.rpartition(".")[0]
        if module in MODULES and module != module_of(path):
            found.add(module)
    return found


def stage(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "stepmark" and len(parts) > 1 and parts[1] in ORDER else None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_come_from_earlier_stages(path: Path) -> None:
    mine = ORDER.index(path.relative_to(SOURCE).with_suffix("").parts[0])
    later = {name for name in imported(path) if (found := stage(name)) is not None and ORDER.index(found) > mine}
    assert not later


def room(module: str) -> tuple[str, str] | None:
    """The package, and the sub-package or module of it, that a module is in; None for a package itself."""
    parts = module.split(".")
    return (parts[1], parts[2]) if parts[0] == "stepmark" and len(parts) > 2 else None


def level(package: str, name: str) -> int:
    return next(index for index, rooms in enumerate(INNER_ORDER[package]) if name in rooms)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_rooms_of_a_package_have_an_order(path: Path) -> None:
    """A room imports from lower levels of its package, and from itself: save and restore do not know each other."""
    mine = room(module_of(path))
    if mine is None:
        return
    found = {room(name) for name in imported_modules(path, typing=True)} - {mine, None}
    rooms = {each[1] for each in found if each is not None and each[0] == mine[0]}
    assert not {each for each in rooms if level(mine[0], each) >= level(*mine)}


def test_the_table_of_rooms_is_complete() -> None:
    rooms = {found for module in MODULES if (found := room(module)) is not None}
    listed = [(package, each) for package, levels in INNER_ORDER.items() for row in levels for each in row]
    assert sorted(listed) == sorted(rooms)


def test_the_command_line_alone_knows_other_programs_formats() -> None:
    users = {
        path.relative_to(SOURCE).parts[0]
        for path in SOURCE.rglob("*.py")
        if any(name.split(".")[:2] == ["stepmark", "interchange"] for name in imported(path))
    }
    assert users == {"cli", "interchange"}


@pytest.mark.parametrize("path", sorted((SOURCE / "checkpoint/format").glob("*.py")), ids=lambda path: path.stem)
def test_the_format_knows_neither_ranks_nor_devices(path: Path) -> None:
    ours = {name for name in imported(path) if name.startswith("stepmark.")}
    assert not {name for name in ours if not name.startswith(FORMAT_MAY_IMPORT)}


@pytest.mark.parametrize("typing", [False, True], ids=["at-run-time", "with-typing"])
def test_no_modules_import_each_other(typing: bool) -> None:
    graph = {module: imported_modules(path, typing=typing) for module, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a cycle of imports: {' -> '.join(reversed(error.args[1]))}")


def test_torch_xla_has_one_door() -> None:
    users = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if any(name.split(".")[0] == "torch_xla" for name in imported(path, typing=False))
    }
    assert users == {"runtime/xla.py"}


@pytest.mark.parametrize(
    ("code", "kept_out"),
    [
        ("import stepmark", {"torch", "transformers", "datasets", "torch_xla", "yaml", "rich"}),
        ("from stepmark.cli.main import build_parser; build_parser()", {"torch", "transformers", "datasets"}),
        ("import stepmark.launch.supervisor", {"torch", "transformers", "torch_xla"}),
        ("from stepmark.cli.main import run; run('precompile --learning_rat 1'.split())", {"torch", "transformers"}),
        ("import stepmark.report.page", {"torch", "transformers", "numpy", "matplotlib"}),
    ],
)
def test_what_is_quick_stays_quick(code: str, kept_out: set[str]) -> None:
    """Importing torch alone takes seconds; help and the supervisor do without."""
    asked = f"{code}; import sys; print(' '.join(sys.modules))"
    told = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert not kept_out & set(told.stdout.split())
