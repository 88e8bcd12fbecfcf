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
CI = ("checks", "nightly", "weekly")
WORKFLOWS = {name: YAML(typ="safe").load(ROOT / ".github" / "workflows" / f"{name}.yml") for name in CI}
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def matrix_of(workflow: str, job: str) -> dict[str, Any]:
    """A job's matrix, whose targets are those of make."""
    matrix: dict[str, Any] = WORKFLOWS[workflow]["jobs"][job]["strategy"]["matrix"]
    assert [each["torch"] for each in matrix["include"]] == matrix["torch"]
    assert {each["target"] for each in matrix["include"]} <= TARGETS
    return matrix


def test_every_night_runs_on_every_python_and_torch() -> None:
    matrix = matrix_of("nightly", "test")
    assert matrix["python"] == ["3.11", "3.12", "3.13"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={matrix['python'][0]}"
    assert {each["target"] for each in matrix["include"]} == {"test-nightly", "test-newest", "test-latest"}
    smoke = matrix_of("checks", "smoke")
    assert set(smoke["python"]) < set(matrix["python"])
    assert set(smoke["torch"]) < set(matrix["torch"])
    makefile = (ROOT / "Makefile").read_text()
    for pinned in ("2.9.1", "2.13"):
        assert any(pinned in name for name in matrix["torch"])
        assert re.search(rf"^TORCH_\w+ := {pinned}", makefile, re.MULTILINE)


def test_what_is_run_are_targets_of_make() -> None:
    jobs = [job for workflow in WORKFLOWS.values() for job in workflow["jobs"].values()]
    steps = [step["run"].partition("${{")[0].split() for job in jobs for step in job["steps"] if "run" in step]
    assert {command for command, *_ in steps} == {".ci/run"}
    assert [".ci/run"] in steps
    default = re.findall(r"set -- (.+)", (ROOT / ".ci" / "run").read_text())[0].split()
    assert default == ["test", "test-newest", "test-scalar", "test-lazy"]
    named = {target for _, *targets in steps for target in targets}
    image = set(re.findall(r"&& make (\S+)", (ROOT / "Dockerfile").read_text()))
    assert {"check", "docs", "test-lowest", "test-optional"} <= named
    assert named | set(default) <= TARGETS
    assert image == {".venv/.installed"}
    assert 'CMD ["make", "demo", "DEVICE=xla"]' in (ROOT / "Dockerfile").read_text()


def test_samples_of_the_suite_exist() -> None:
    named = (ROOT / "Makefile").read_text() + (ROOT / "constraints" / "lowest-tests.txt").read_text()
    paths = re.findall(r"\btests/\w[\w/.]*", named)
    assert len(paths) > 15
    assert [path for path in paths if not (ROOT / path).exists()] == []
    tests = re.findall(r"\b(tests/\w[\w/.]*)::(\w+)", named)
    assert [(path, name) for path, name in tests if f"def {name}(" not in (ROOT / path).read_text()] == []


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
