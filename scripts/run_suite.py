"""Runs the tests, and once more, alone, what failed of them: `python scripts/run_suite.py -m pytest …`.

Tests that start ranks, servers and kills run beside each other on a few processors, and one of thousands may miss a
deadline for that alone. Up to five that failed are run again in one process with nothing beside it; what fails again is
red, and what passes then is named, to be mended.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

AGAIN = 5  # more than that is no accident
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


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        code = subprocess.call([sys.executable, *arguments, f"--junitxml={report}"])
        failed = failures(report) if code == FAILED and report.exists() else []
        if not 0 < len(failed) <= AGAIN:
            return code
        print(f"once more, alone: {' '.join(failed)}", flush=True)
        code = subprocess.call([sys.executable, "-m", "pytest", *failed])
        if not code:
            print(f"failed beside others, passed alone, to be mended: {' '.join(failed)}", flush=True)
        return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
