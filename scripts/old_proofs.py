"""Prints the large matrices whose last result is older than the code that it proves, and what would renew them.

A row of docs/data/proof.json names the packages whose code it proves. Their modules at the row's commit and now are
compared without comments and docstrings, which change no result.
"""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

from scripts.tables import read_rows

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def git(*arguments: str) -> str:
    """What a git command prints; nothing where it fails."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout


def essence(source: str) -> str:
    """A module's code without comments, docstrings and layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(tree)


@cache
def module(commit: str, path: str) -> str:
    """The essence of a module at a commit; an empty one where there is none."""
    return essence(git("show", f"{commit}:{path}"))


def changed(commit: str, packages: list[str]) -> list[str]:
    """The modules of packages whose code is another one since a commit."""
    folders = [f"src/stepmark/{package}" for package in packages]
    paths = git("diff", "--name-only", commit, "HEAD", "--", *folders).split()
    return [path for path in paths if path.endswith(".py") and module(commit, path) != module("HEAD", path)]


def main() -> int:
    """Prints a line for each row that is behind, and one command; exits with 0."""
    behind = []
    for row in read_rows("proof"):
        commit, packages = row["commit"].rstrip("*"), row["packages"].split()
        if not commit:
            print(f"{row['matrix']}: never run")
        elif not git("cat-file", "-t", commit):
            print(f"{row['matrix']}: {commit} is not in this clone's history")
        elif paths := changed(commit, packages):
            behind.append(row["matrix"])
            print(f"{row['matrix']}: {row['date']} at {commit}, {len(paths)} modules changed since, such as {paths[0]}")
    if behind:
        print(f'\nmake prove WHAT="{" ".join(behind)}"')
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
    sys.exit(main())
