"""CI, pre-commit, the Dockerfile and the templates name what the repository has."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[1]
TARGETS = set(re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)) | {".venv/.installed"}
CHECKS = YAML(typ="safe").load(ROOT / ".github" / "workflows" / "checks.yml")
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def test_pull_requests_run_on_every_python_and_torch() -> None:
    matrix = CHECKS["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == ["3.11", "3.12", "3.13"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={matrix['python'][0]}"
    assert [each["torch"] for each in matrix["include"]] == matrix["torch"]
    assert {each["target"] for each in matrix["include"]} == {"test", "test-newest", "test-latest"} <= TARGETS
    makefile = (ROOT / "Makefile").read_text()
    for pinned in ("2.9.1", "2.13"):
        assert any(pinned in name for name in matrix["torch"])
        assert re.search(rf"^TORCH_\w+ := {pinned}", makefile, re.MULTILINE)


def test_what_is_run_are_targets_of_make() -> None:
    steps = [step["run"] for job in CHECKS["jobs"].values() for step in job["steps"] if "run" in step]
    named = {found for step in steps for found in re.findall(r"^make ([\w-]+)", step)}
    image = set(re.findall(r"&& make (\S+)", (ROOT / "Dockerfile").read_text()))
    assert {"check", "docs"} <= named <= TARGETS
    assert image == {".venv/.installed"}
    assert 'CMD ["make", "demo", "DEVICE=xla"]' in (ROOT / "Dockerfile").read_text()


def test_pre_commit_uses_the_pinned_ruff() -> None:
    hooks = YAML(typ="safe").load(ROOT / ".pre-commit-config.yaml")["repos"]
    (ruff,) = (repo for repo in hooks if repo["repo"].endswith("ruff-pre-commit"))
    pinned = re.findall(r"^ruff==(\S+)", (ROOT / "constraints" / "torch-2.9.1.txt").read_text(), re.MULTILINE)
    assert pinned == [ruff["rev"].removeprefix("v")]
    (local,) = (repo for repo in hooks if repo["repo"] == "local")
    assert all((ROOT / hook["entry"].split()[1]).exists() for hook in local["hooks"])


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_a_template_asks_for_something(path: Path) -> None:
    template: dict[str, Any] = YAML(typ="safe").load(path)
    if path.name != "config.yml":
        assert template["name"]
        assert template["description"]
        ids = [part["id"] for part in template["body"] if part["type"] != "markdown"]
        assert len(ids) == len(set(ids)) > 1
