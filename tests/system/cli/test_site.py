"""The documentation site: its pages are made, and what its tutorials tell the reader to run does run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import ROOT

PAGES = sorted([*(ROOT / "docs" / "start").glob("*.md"), *(ROOT / "docs" / "tutorials").glob("*.md")])
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
NOT_RUN = "console"  # installing


def steps(page: Path) -> list[tuple[str, str, str]]:
    """Language, file name and content of every block, in order."""
    return FENCE.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_is_a_file_or_is_run(page: Path) -> None:
    for language, name, _ in steps(page):
        assert (language in ("sh", NOT_RUN)) != bool(name), (language, name)
    assert page.read_text(encoding="utf-8").count("```") == 2 * len(steps(page))


@pytest.mark.prove
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_in_order(page: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    environment["USE_TORCH_XLA"] = "0"  # or transformers' own Trainer takes XLA's CPU client, where it is installed
    for language, name, content in steps(page):
        if name:
            (tmp_path / name).write_text(content)
        elif language == "sh":
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", content],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, f"{content}\n{done.stdout}\n{done.stderr}"
            assert "Traceback" not in done.stderr, done.stderr
