"""Runs the tests, and once more, alone, what failed of them: `python scripts/run_suite.py -m pytest …`.

Tests that start ranks, servers and kills run beside each other on a few processors, and one of thousands may miss a
deadline for that alone. Up to five that failed are run again in one process with nothing beside it; what fails again is
red, and what passes then is named, to be mended. pytest's report stays in build/, and the slowest tests are named.
"""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

AGAIN = 5  # more than that is no accident
SLOWEST = 30  # are named
REPORT = Path("build/suite.xml")
FAILED = 1  # pytest's exit code for tests that failed


def failures(report: Path) -> list[str]:
    """The tests of a JUnit report (family xunit1) that failed, as arguments of pytest."""
    failed = []
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            path = case.get("file", "")
            own = case.get("classname", "").removeprefix(path.removesuffix(".py").replace("/", ".")).strip(".")
            failed.append("::".join(part for part in [path, *own.split("."), case.get("name", "")] if part))
    return list(dict.fromkeys(failed))


def slowest(report: Path) -> list[str]:
    """A line for each of the slowest tests, and their share of the time that all tests took."""
    cases = sorted(ElementTree.parse(report).iter("testcase"), key=lambda case: -float(case.get("time", 0)))
    seconds = [float(case.get("time", 0)) for case in cases]
    share = sum(seconds[:SLOWEST]) / sum(seconds) if any(seconds) else 1.0
    named = [f"{case.get('time')} s  {case.get('file')}::{case.get('name')}" for case in cases[:SLOWEST]]
    return [f"the {len(named)} slowest of {len(cases)} tests took {share:.0%} of their time:", *named]


def main(arguments: list[str]) -> int:
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.unlink(missing_ok=True)
    code = subprocess.call([sys.executable, *arguments, f"--junitxml={REPORT}"])
    if not REPORT.exists():
        return code
    print(*slowest(REPORT), sep="\n", flush=True)
    failed = failures(REPORT) if code == FAILED else []
    if not 0 < len(failed) <= AGAIN:
        return code
    print(f"once more, alone: {' '.join(failed)}", flush=True)
    code = subprocess.call([sys.executable, "-m", "pytest", *failed])
    if not code:
        print(f"failed beside others, passed alone, to be mended: {' '.join(failed)}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
