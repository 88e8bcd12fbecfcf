"""What failed beside others is run again alone, and is red only if it fails again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts/run_suite.py"
TESTS = """
from pathlib import Path
import pytest

class TestOnce:
    @pytest.mark.parametrize("word", ["two words"])
    def test_passes_the_second_time(self, word):
        mark = Path(__file__).with_name("mark")
        there = mark.exists()
        mark.touch()
        assert there

@pytest.mark.parametrize("number", range({broken}))
def test_is_broken(number):
    raise ValueError
"""


@pytest.mark.parametrize(("broken", "code", "again"), [(0, 0, True), (1, 1, True), (5, 1, False)])
def test_what_failed_is_run_once_more_alone(tmp_path: Path, broken: int, code: int, again: bool) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\njunit_family = xunit1\n")
    (tmp_path / "test_some.py").write_text(TESTS.format(broken=broken))
    command = [sys.executable, str(SCRIPT), "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == code, run.stdout
    assert "tests took 100% of their time:" in run.stdout
    assert (tmp_path / "build/suite.xml").exists()
    assert ("once more, alone" in run.stdout) == again
    assert ("to be mended: test_some.py::TestOnce::test_passes_the_second_time[two words]" in run.stdout) == (not code)
