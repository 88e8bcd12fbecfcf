"""Prints every module of the source with the first sentence of its docstring, by package.

The documentation site has the same as a page, made when it is built (site_pages.py).
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "stepmark"
SENTENCE = re.compile(r"(.+?[.?!])(?:\s+[A-Z`]|\s*$)", re.DOTALL)


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, in one line; empty if it has none."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = text.split("\n\n")[0]
    found = SENTENCE.match(paragraph)
    return " ".join((found[1] if found else paragraph).split())


def source_map(source: Path = SOURCE) -> dict[str, dict[str, str]]:
    """Sentences by package, and in it by module; a package's own sentence is under `__init__.py`."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted(source.rglob("*.py"), key=lambda path: (path.parent.parts, path.name)):
        package = path.parent.relative_to(source).as_posix()
        found.setdefault(package, {})[path.name] = first_sentence(path)
    return found


def page(source: Path = SOURCE) -> str:
    """The map as Markdown."""
    lines = ["# Source map", "", "Every module, with the first sentence of its docstring.", ""]
    for package, modules in source_map(source).items():
        own = modules.pop("__init__.py", "")
        lines += [f"## {'stepmark' if package == '.' else package + '/'}", ""] + ([own, ""] if own else [])
        lines += [f"- `{name}`: {sentence}" for name, sentence in modules.items()] + [""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page())
