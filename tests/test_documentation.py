"""The paths and links in the documentation exist, and every module has a sentence in the map of the source."""

from __future__ import annotations

import re
import runpy
import sys
import tomllib
import typing
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import stepmark
from stepmark.config.fields import REFERENCE
from stepmark.config.optimizers import check_optimizer
from stepmark.config.recipe import all_fields
from stepmark.config.refusals import Origin, refusals
from stepmark.config.unknown_fields import OF_RECIPES, unknown_fields
from stepmark.errors import UsageError
from tests.support.ranks import Ranks

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "stepmark"
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
QUOTED = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w./-]*\w\.py\Z")
FOLDER = re.compile(r"(?:[a-z_0-9]+/)+\Z")
MODULE = re.compile(r"stepmark(?:\.\w+)+\Z")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
ANCHORED = re.compile(r"\]\(([^)#:\s]*)#([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
TOPS = ("src", "tests", "docs", "examples", "scripts", "benchmarks", "constraints")
MADE = {"reference/fields.md", "reference/commands.md"}  # by scripts/site_pages.py
EXAMPLES = {"my_module.py"}  # files of the reader
PUBLIC_NAMES = ROOT / "examples" / "public_names.py"
source_map = runpy.run_path(str(ROOT / "scripts" / "source_map.py"))
ON_DISK = {"optimizer/", "state/"}  # folders in a checkpoint


def repository() -> list[str]:
    """Paths of the repository's files and folders, with a leading slash; folders with a trailing one."""
    found = [path for top in TOPS for path in (ROOT / top, *(ROOT / top).rglob("*"))]
    return [f"/{path.relative_to(ROOT).as_posix()}{'/' if path.is_dir() else ''}" for path in found]


def missing_paths(text: str, paths: list[str]) -> Iterator[str]:
    """Files, folders and modules in backquotes that are neither in the repository nor public names."""
    for quoted in QUOTED.findall(text):
        if (FILE.match(quoted) or FOLDER.match(quoted)) and quoted not in EXAMPLES | ON_DISK:
            if not any(path.endswith("/" + quoted) for path in paths):
                yield quoted
        elif MODULE.match(quoted):
            parent, _, name = quoted.rpartition(".")
            public = parent == "stepmark" and name in {*stepmark.__all__, "errors", "checkpoint"}
            if not public and find_spec(quoted) is None:
                yield quoted


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_and_modules_exist(page: Path) -> None:
    assert list(missing_paths(page.read_text(encoding="utf-8"), repository())) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))
    assert [link for link in links if link not in MADE and not (page.parent / link).exists()] == []


def anchors(page: Path) -> set[str]:
    """What a link to a page may name: its headings, as the site and GitHub write them, and its own marks."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in HEADING.findall(text)}
    return headings | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_name_places_of_a_page(page: Path) -> None:
    for target, anchor in ANCHORED.findall(page.read_text(encoding="utf-8")):
        path = page.parent / target if target else page
        if path.suffix == ".md" and path.exists():
            assert anchor in anchors(path), f"{target}#{anchor}"


@pytest.fixture
def site_pages(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the site's pages are made by, without mkdocs."""
    monkeypatch.setitem(sys.modules, "mkdocs", ModuleType("mkdocs"))
    monkeypatch.setitem(sys.modules, "mkdocs.structure", ModuleType("mkdocs.structure"))
    monkeypatch.setitem(sys.modules, "mkdocs.exceptions", SimpleNamespace(PluginError=None))
    files = SimpleNamespace(File=None, Files=None)
    monkeypatch.setitem(sys.modules, "mkdocs.structure.files", files)
    return runpy.run_path(str(ROOT / "scripts" / "site_pages.py"))


def test_the_reference_of_commands_has_what_help_has(site_pages: dict[str, Any]) -> None:
    page = site_pages["commands_page"]()
    assert "SUPPRESS" not in page
    assert "| `--to` `{hf,dcp,hf-trainer}` |" in page


def described_at(address: str, site_pages: dict[str, Any]) -> bool:
    """Whether the site has the place that an error names. The build looks for all of them in its HTML."""
    page, _, anchor = address.removeprefix(f"{REFERENCE}/").partition("/#")
    text: str = site_pages[f"{page.replace('-', '_')}_page"]()
    return f"{{#{anchor}}}" in text


def test_an_error_about_a_field_says_where_it_is_described(site_pages: dict[str, Any]) -> None:
    for name, field in all_fields().items():
        with pytest.raises(UsageError, match=f"^{name}: ") as caught:
            field.checked(object())
        assert str(caught.value).endswith(f"; see {REFERENCE}/fields/#{name}")
        assert described_at(str(caught.value).rpartition(" ")[2], site_pages)


def test_an_unknown_name_says_where_ours_is_described(site_pages: dict[str, Any]) -> None:
    old = {name for origin in OF_RECIPES for name in refusals(origin)} - set(all_fields())
    for name in (*old, *(f"{name}x" for name in all_fields() if len(name) > 9)):
        said = unknown_fields([name], all_fields())
        assert REFERENCE in said, said
        assert described_at(said.rpartition(" ")[2], site_pages), said
    assert unknown_fields(["deepspeeds"], all_fields()).count("https:") == 0  # only --help describes what is meant
    assert unknown_fields(["hub_strateg"], ["hub_strategy"]).endswith("did you mean hub_strategy?")  # no recipe field
    with pytest.raises(UsageError, match=f"^optim: .*; see {REFERENCE}/fields/#optim$"):
        check_optimizer("adam")
    assert unknown_fields(["do_eval", "max_stepss"], all_fields()).count("https:") == 0


def test_all_say_one_address_of_the_documentation() -> None:
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Documentation"]
    assert f"{ours}reference" == REFERENCE
    assert f"\nsite_url: {ours} " in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_the_reference_has_every_old_name(site_pages: dict[str, Any]) -> None:
    page = site_pages["old_names_page"]()
    assert set(site_pages["ORIGINS"]) == set(typing.get_args(Origin))
    for origin in typing.get_args(Origin):
        assert [name for name in refusals(origin) if f"`{name}`" not in page] == []


INSTALLS = re.compile(r"pip install [\"']?(stepmark\S*)")
IN_PLACE = {f"stepmark[{extra}]" for extra in ("peft", "s3", "sentence-transformers", "trl", "wandb")}


def test_nothing_is_installed_from_an_index_that_lacks_it() -> None:
    """Whoever takes the name there is installed. An extra is that of the Stepmark that is there already."""
    found = {name.strip("\"'`,.") for page in PAGES for name in INSTALLS.findall(page.read_text(encoding="utf-8"))}
    assert found <= IN_PLACE


def test_the_map_of_the_source_has_a_sentence_for_every_module() -> None:
    found = source_map["source_map"]()
    assert {Path(package) / name for package, modules in found.items() for name in modules} == {
        path.relative_to(SOURCE) for path in SOURCE.rglob("*.py")
    }
    unnamed = [(at, name) for at, modules in found.items() for name, told in modules.items() if not told]
    assert [each for each in unnamed if each[1] != "__init__.py"] == []


def test_the_architecture_names_every_package() -> None:
    table = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("## Packages")[1].split("\n## ")[0]
    named = re.findall(r"^\|[^|]*\| \*\*(\w+)\*\* \|", table, re.MULTILINE)
    assert sorted(named) == sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))


def test_every_public_name_has_a_reference_and_an_example() -> None:
    opened = re.split(r"^# stepmark\.", PUBLIC_NAMES.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    examples = dict(each.split("\n", 1) for each in opened)
    referred = re.findall(
        r"^::: stepmark\.([\w.]+)", (ROOT / "docs" / "reference" / "python.md").read_text(), re.MULTILINE
    )
    assert sorted(examples) == sorted(referred) == sorted([*stepmark.__all__, "checkpoint.dcp"])
    assert [name for name, text in examples.items() if f"stepmark.{name}" not in text] == []


def test_the_examples_of_public_names_run(ranks: Ranks, tmp_path: Path) -> None:
    done = ranks.script(PUBLIC_NAMES.read_text(encoding="utf-8"), str(tmp_path), timeout=300)
    assert done.returncode == 0, done.stderr
    assert "saving checkpoint-4" in done.stdout + done.stderr


@pytest.mark.parametrize(
    "text",
    ["`checkpoint/nothing.py`", "`nothing.py`", "`parallel/nothing/`", "`stepmark.nothing`", "`stepmark.cli.nothing`"],
)
def test_a_missing_path_is_found(text: str) -> None:
    assert list(missing_paths(text, repository())) == [text.strip("`")]
