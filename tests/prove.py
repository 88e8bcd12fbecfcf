"""Runs the large test matrices whole, one file after another, and keeps in docs/proof.md what came out.

make prove
make prove WHAT="tests/system/fault/test_kills.py tests/system/fault/test_stopped.py"

A file has large matrices where it marks tests with `prove`. Each has its line, with its own date and commit; the lines
of files that are not run stay as they were.
"""

from __future__ import annotations

import ast
import os
import platform
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "build" / "prove.xml"
PROOF = ROOT / "docs" / "proof.md"
COLUMNS = ("matrix", "what it shows", "tests", "tried", "minutes", "date", "commit")
Row = tuple[str, ...]


def main() -> int:
    REPORT.parent.mkdir(exist_ok=True)
    files, worst = matrices(), 0
    unknown = set(sys.argv[1:]) - set(files)
    if unknown:
        print(f"no large matrices in {', '.join(sorted(unknown))}; there are {', '.join(files)}", file=sys.stderr)
        return 2
    rows = {row[0]: row for row in read_rows() if row[0] in files}
    for file in sys.argv[1:] or files:
        REPORT.unlink(missing_ok=True)
        started, commit = time.time(), revision()
        command = [sys.executable, "-m", "pytest", "-m", "prove or not prove", f"--junitxml={REPORT}", file]
        worst = max(worst, subprocess.run(command, cwd=ROOT).returncode)
        tests, tried = results()
        minutes = f"{(time.time() - started) / 60:.0f}"
        rows[file] = (file, shows(file), tests, tried, minutes, time.strftime("%Y-%m-%d"), commit)
        print(f"{file}: {tests}; {tried or 'nothing counted'}", flush=True)
        write_rows([rows[name] for name in files if name in rows], [name for name in files if name not in rows])
    return worst


def matrices() -> list[str]:
    """The files of tests with large matrices."""
    paths = sorted(ROOT.glob("tests/**/test_*.py"))
    return [str(path.relative_to(ROOT)) for path in paths if "pytest.mark.prove" in path.read_text()]


def shows(file: str) -> str:
    """The first sentence of the file's docstring."""
    text = ast.get_docstring(ast.parse((ROOT / file).read_text())) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("|", "or")


def results() -> tuple[str, str]:
    """How the tests went, and what they counted (with pytest's `record_property`), from pytest's report."""
    if not REPORT.exists():
        return "did not run", ""
    outcomes: Counter[str] = Counter()
    counted: Counter[str] = Counter()
    for case in ElementTree.parse(REPORT).getroot().iter("testcase"):
        outcomes[next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "passed")] += 1
        for each in case.iter("property"):
            counted[each.attrib["name"]] += int(each.attrib["value"])
    return in_words(outcomes), in_words(counted)


def in_words(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())


def read_rows() -> list[Row]:
    lines = PROOF.read_text().splitlines() if PROOF.exists() else []
    cells = [
        tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines if line.startswith("| tests/")
    ]
    return [row for row in cells if len(row) == len(COLUMNS)]


def write_rows(rows: list[Row], missing: list[str]) -> None:
    lines = [
        "# The large test matrices",
        "",
        f"What `make prove` found when it last ran each of them whole, with Python {platform.python_version()}, "
        f"{', '.join(f'{name} {version(name)}' for name in ('torch', 'torch_xla', 'transformers'))} on "
        f"{os.cpu_count()} CPU cores. `make test` runs a sample of each.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "| --- |" + " --- |" * (len(COLUMNS) - 1),
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    lines += ["", f"Not run yet: {', '.join(missing)}."] if missing else []
    PROOF.write_text("\n".join(lines) + "\n")


def revision() -> str:
    """The commit that is tried; with a star where files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "src", "tests", "pyproject.toml")
    return git("rev-parse", "--short", "HEAD") + ("*" if changed else "")


if __name__ == "__main__":
    sys.exit(main())
