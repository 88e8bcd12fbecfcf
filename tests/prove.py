"""Runs the large test matrices in full, one file after another, and records the results in docs/data/proof.json.

make prove
make prove WHAT="tests/system/fault/test_kills.py tests/system/fault/test_stopped.py"
make fault SAMPLE=6    # every sixth fault; records nothing

On a native device, in the environment without torch_xla, whose rows say so:
    .venv-newest/bin/python -m tests.prove tests/runtime/test_native_models.py

A file with tests marked `prove` is a matrix. Each has a row with its own date and commit; rows of files that are not
run stay as they are. A row that failed, skipped tests or was never run needs a reason in its `note`: it is written by
hand, and tests/test_tables.py demands it. `python -m scripts.old_proofs` says which rows are older than the code that
they prove.
"""

from __future__ import annotations

import argparse
import ast
import os
import platform
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from scripts.tables import Row, read_rows, read_table, write_table

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "build" / f"prove-{os.getpid()}.xml"  # two files may be run at a time
COLUMNS = ("matrix", "what it shows", "packages", "tests", "tried", "minutes", "date", "commit", "note")
NOT_RUN = "not run"
# The packages whose code a matrix proves, by the longest part of its path that is here; of others that of its folder.
PACKAGES = {
    "system/cli": "cli recipe report trainer watcher",
    "system/distributed": "launch liveness runtime trainer",
    "system/fault": "checkpoint filesystem launch liveness trainer",
    "system/hostile": "checkpoint cli filesystem interchange launch liveness trainer watcher",
    "system/parity": "parallel runtime sharding training",
    "system/distributed/test_machines": "checkpoint filesystem launch liveness trainer",
    "system/distributed/test_sharded_loading": "model_folder parallel sharding",
    "system/parity/test_chat_model": "data training",
    "system/parity/test_hooks": "parallel runtime sharding trainer training",
    "system/parity/test_imported_runs": "checkpoint interchange trainer",
    "system/parity/test_mesh_checkpoints": "checkpoint parallel sharding",
    "system/parity/test_own_optimizers": "checkpoint parallel trainer training",
    "system/parity/test_undisturbed": "checkpoint evaluation runtime trainer training",
    "test_running_page": "launch liveness trainer",
}
HAS_XLA = find_spec("torch_xla") is not None
SAMPLE_VARIABLE = "STEPMARK_FAULT_SAMPLE"  # read by tests/system/fault/test_faults.py


def main() -> int:
    files = matrices()
    options = parse_arguments(files)
    if options.sample > 1:
        os.environ[SAMPLE_VARIABLE] = str(options.sample)
    REPORT.parent.mkdir(exist_ok=True)
    return max(prove(file, files, record=options.sample == 1) for file in options.files or files)


def parse_arguments(files: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="prove.py")
    parser.add_argument("files", nargs="*", metavar="FILE", help=f"among {', '.join(files)} (default: all)")
    parser.add_argument("--sample", type=int, default=1, metavar="N", help="every N-th point, and record nothing")
    options = parser.parse_args()
    unknown = set(options.files) - set(files)
    if unknown:
        parser.error(f"not a large matrix: {', '.join(sorted(unknown))}; choose from {', '.join(files)}")
    return options


def prove(file: str, files: list[str], *, record: bool) -> int:
    """Runs one matrix, prints its results and, to `record` them, replaces its row; pytest's exit code."""
    REPORT.unlink(missing_ok=True)
    started, commit = time.time(), revision()
    command = [sys.executable, "-m", "pytest", "-m", "prove or not prove", f"--junitxml={REPORT}", file]
    environment = {**os.environ, "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")}  # compiled as for users
    code = subprocess.run(command, cwd=ROOT, env=environment).returncode
    tests, tried = results()
    REPORT.unlink(missing_ok=True)
    minutes = f"{(time.time() - started) / 60:.0f}"
    print(f"{file}: {tests}; {tried or 'nothing counted'}; {minutes} minutes", flush=True)
    if record:
        note = "" if HAS_XLA else f"on torch {version('torch')}, without torch_xla"
        values = (file, shows(file), packages(file), tests, tried, minutes, time.strftime("%Y-%m-%d"), commit, note)
        write_rows(files, dict(zip(COLUMNS, values, strict=True)))
    return code


def matrices() -> list[str]:
    """The test files that have large matrices."""
    paths = sorted(ROOT.glob("tests/**/test_*.py"))
    return [str(path.relative_to(ROOT)) for path in paths if "pytest.mark.prove" in path.read_text()]


def shows(file: str) -> str:
    """The first sentence of the file's docstring."""
    text = ast.get_docstring(ast.parse((ROOT / file).read_text())) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("|", "or")


def packages(file: str) -> str:
    """The packages whose code a matrix proves; see scripts/old_proofs.py."""
    path = file.removeprefix("tests/").removesuffix(".py")
    found = max((each for each in PACKAGES if path.startswith(each)), key=len, default=None)
    return path.split("/")[0] if found is None else PACKAGES[found]


def results() -> tuple[str, str]:
    """The outcomes of the tests and what they counted with pytest's `record_property`, from pytest's report."""
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


def write_rows(files: list[str], new: Row) -> None:
    """Writes a row for every matrix. The row of a file that has moved follows it by name, unless several may be it."""
    known = {row["matrix"]: row for row in [*read_rows("proof"), new]}
    moved = {Path(matrix).name: row for matrix, row in known.items() if matrix not in files}
    without = Counter(Path(file).name for file in files if file not in known)
    for file in files:
        name = Path(file).name
        if file not in known and without[name] == 1 and name in moved:
            known[file] = moved[name]
    blank = {**dict.fromkeys(COLUMNS, ""), "tests": NOT_RUN}
    rows = []
    for file in files:
        own = {"matrix": file, "packages": packages(file)}
        found = {**blank, "what it shows": shows(file), **known.get(file, {}), **own}
        rows.append({name: found[name] for name in COLUMNS})
    made_by = read_table("proof")["made_by"]
    if HAS_XLA:
        versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "torch_xla", "transformers"))
        made_by = f"`make prove` on Python {platform.python_version()}, {versions} and {os.cpu_count()} CPU cores"
    write_table("proof", "Large test matrices", made_by, rows)


def revision() -> str:
    """The commit that is tested, with a star if files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "src", "tests", "pyproject.toml")
    return git("rev-parse", "--short", "HEAD") + ("*" if changed else "")


if __name__ == "__main__":
    sys.exit(main())
