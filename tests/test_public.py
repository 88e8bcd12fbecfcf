"""Examples and documentation use public names only: of `stepmark` and its public modules."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import stepmark
import stepmark.checkpoint
import stepmark.errors
import stepmark.sentence_transformers
import stepmark.trl

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = {
    "stepmark": set(stepmark.__all__),
    "stepmark.checkpoint": set(stepmark.checkpoint.__all__),
    "stepmark.sentence_transformers": set(stepmark.sentence_transformers.__all__),
    "stepmark.trl": set(stepmark.trl.__all__),
    "stepmark.errors": {name for name in vars(stepmark.errors) if name[0].isupper()},
}
KNOWN = {*PUBLIC["stepmark"], "checkpoint", "errors", "sentence_transformers", "trl"}
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINES = 45  # of the custom loop's function


def private_uses(code: str) -> Iterator[str]:
    """Names of stepmark that the code imports, or reads as `stepmark.name`, and that are not public."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "stepmark":
            public = PUBLIC.get(node.module or "", set())
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name not in public)
        elif isinstance(node, ast.Import):
            names = (alias.name for alias in node.names)
            yield from (name for name in names if name.split(".")[0] == "stepmark" and name not in PUBLIC)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "stepmark" and node.attr not in KNOWN:
            yield f"stepmark.{node.attr}"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_use_public_names(path: Path) -> None:
    assert list(private_uses(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_documentation_uses_public_names(path: Path) -> None:
    blocks = BLOCK.findall(path.read_text(encoding="utf-8"))
    assert [name for block in blocks for name in private_uses(block)] == []


def test_the_documentation_has_code_to_check() -> None:
    blocks = [block for path in PAGES for block in BLOCK.findall(path.read_text(encoding="utf-8"))]
    assert sum("stepmark" in block for block in blocks) >= 2


@pytest.mark.parametrize(
    "code", ["from stepmark.training.step import TrainStep", "import stepmark.cli", "stepmark.nope()"]
)
def test_a_private_name_is_found(code: str) -> None:
    assert len(list(private_uses(code))) == 1


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_exist(module: str) -> None:
    loaded = importlib.import_module(module)
    if module == "stepmark.sentence_transformers":
        pytest.importorskip("sentence_transformers")
    assert all(hasattr(loaded, name) for name in PUBLIC[module])


def test_the_custom_loop_stays_short() -> None:
    tree = ast.parse((ROOT / "examples" / "custom_loop.py").read_text(encoding="utf-8"))
    main = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
    assert main.end_lineno is not None
    assert main.end_lineno - main.lineno < LINES
