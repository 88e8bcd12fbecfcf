"""The built wheel has everything, and what the documentation installs from works in a fresh environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from stepmark.config.yaml_file import parse_yaml

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("src", "setup.py", "pyproject.toml", "README.md", "LICENSE")


def call(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What of a clone an installation reads."""
    folder = tmp_path_factory.mktemp("wheel") / "clone"
    for name in COPIED:
        source = ROOT / name
        ignored = shutil.ignore_patterns("*.egg-info", "__pycache__")
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    call(*pip, "--wheel-dir", folder, clone, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_has_every_file_of_the_package_and_its_license(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    source = ROOT / "src"
    files = [path for path in (source / "stepmark").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.relative_to(source).as_posix() for path in files} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_an_index_shows_a_readme_whose_links_lead_to_the_repository(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        headers, _, text = archive.read(metadata).decode("utf-8").partition("\n\n")
    assert "Description-Content-Type: text/markdown" in headers
    source = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", text)
    assert len(links) > 20
    for picture, link in links:
        path = link.removeprefix(f"{source}/{'raw' if picture else 'blob'}/main/").partition("#")[0]
        assert (ROOT / path).exists(), link


def test_what_the_documentation_installs_works_in_a_fresh_environment(clone: Path, tmp_path: Path) -> None:
    """`pip install .`; its dependencies are those of this environment, whose packages come after its own."""
    venv.create(tmp_path / "fresh", with_pip=False)
    bin_folder = tmp_path / "fresh" / "bin"
    (packages,) = (tmp_path / "fresh" / "lib").glob("python*/site-packages")
    dependencies = sysconfig.get_path("purelib")
    (packages / "dependencies.pth").write_text(f"import site; site.addsitedir({dependencies!r})\n")
    pip = [sys.executable, "-m", "pip", "--python", bin_folder / "python"]
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed")
    call(*pip, "install", *options, ".", cwd=clone)
    where = call(bin_folder / "python", "-c", "import stepmark; print(stepmark.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(packages)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert call(bin_folder / "stepmark", "--version", cwd=tmp_path) == f"stepmark {version}\n"
    call(bin_folder / "stepmark", "init", cwd=tmp_path)
    assert (tmp_path / "recipe.yaml").is_file()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0, "time": 1.0}) + "\n")
    call(bin_folder / "stepmark", "report", "run", cwd=tmp_path)
    page = (tmp_path / "run" / "report.html").read_text()
    assert ".tiles" in page
    assert "class Chart" in page


def test_citation_and_project_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = parse_yaml((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert project["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    workflow = parse_yaml((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert [step["run"] for step in workflow["jobs"]["build"]["steps"] if step.get("run") == "python -m build"]
