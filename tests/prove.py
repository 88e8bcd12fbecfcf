"""Runs the whole suite with the large matrices, and keeps the result in docs/proof.md.

make prove
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "build" / "prove.xml"


def main() -> int:
    REPORT.parent.mkdir(exist_ok=True)
    started = time.time()
    command = [sys.executable, "-m", "pytest", "-m", "prove or not prove", f"--junitxml={REPORT}", *sys.argv[1:]]
    code = subprocess.run(command, cwd=ROOT).returncode
    write_proof(time.time() - started)
    return code


def write_proof(seconds: float) -> None:
    counts: dict[str, Counter[str]] = {}
    for case in ElementTree.parse(REPORT).getroot().iter("testcase"):
        outcome = next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "passed")
        counts.setdefault(case.attrib["classname"].removeprefix("tests."), Counter())[outcome] += 1
    totals: Counter[str] = sum(counts.values(), Counter())
    lines = [
        "# The last whole run of the suite",
        "",
        f"`make prove` on {time.strftime('%Y-%m-%d')}, commit {revision()}, Python {platform.python_version()} with "
        f"{versions()}, on {os.cpu_count()} CPU cores, in {seconds / 60:.0f} minutes: "
        + ", ".join(f"{count} {kind}" for kind, count in totals.items()),
        "",
        "| tests | " + " | ".join(totals) + " |",
        "| --- |" + " --- |" * len(totals),
    ]
    lines += [f"| {name} | " + " | ".join(str(counts[name][kind]) for kind in totals) + " |" for name in sorted(counts)]
    (ROOT / "docs" / "proof.md").write_text("\n".join(lines) + "\n")


def revision() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for name in ("torch", "torch_xla", "transformers"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


if __name__ == "__main__":
    sys.exit(main())
