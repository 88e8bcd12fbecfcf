"""The tables in docs/data are complete and agree with the source; rows that are no success give a reason."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scripts.old_proofs import essence
from scripts.tables import FOLDER, read_rows, write_table
from stepmark.parallel.architectures import EXPERT_PARALLEL, ROUTER_LOSSES, STAGES
from tests.prove import COLUMNS, NOT_RUN, matrices, write_rows

ROOT = Path(__file__).resolve().parents[1]
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
PROOF = read_rows("proof")
PROVED = re.compile(r"([\d,]+) (?:SIGKILLs|file system calls|tests)\b[^[]*\[test\]\((.+?)\), (\S+) at (\w+)\)")
MEASURED = re.compile(r"\[benchmark\]\(benchmarks/(\w+)\.py\), 2 cores, (\S+) at (\w+)\)")


@pytest.mark.parametrize("name", NAMES)
def test_a_table_is_shown_on_the_page_and_can_be_written_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"<!-- table {name} -->" in (ROOT / "docs" / "tables.md").read_text()
    text = (FOLDER / f"{name}.json").read_text()
    table = json.loads(text)
    monkeypatch.setattr("scripts.tables.FOLDER", tmp_path)
    write_table(name, table["title"], table["made_by"], table["rows"])
    assert (tmp_path / f"{name}.json").read_text() == text


def test_rows_with_other_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="keys"):
        write_table("wrong", "", "", [{"a": 1}, {"b": 2}])


def test_the_types_whose_experts_passed_are_those_that_are_accepted() -> None:
    rows = [row for row in read_rows("expert-parallel") if row["verdict"] == "passed"]
    assert {row["model type"] for row in rows} == EXPERT_PARALLEL


def test_the_types_that_passed_in_stages_are_those_that_are_accepted() -> None:
    rows = [row for row in read_rows("pipeline-parallel") if row["verdict"] == "passed"]
    assert {row["model type"] for row in rows} == set(STAGES)
    assert {row["model type"] for row in rows if row["router losses"]} == ROUTER_LOSSES


def test_every_row_names_the_packages_that_it_proves() -> None:
    known = {path.name for path in (ROOT / "src" / "stepmark").iterdir() if path.is_dir()}
    assert not [row["matrix"] for row in PROOF if not known >= set(row["packages"].split()) or not row["packages"]]


def test_code_is_newer_than_a_proof_where_more_than_words_has_changed() -> None:
    before = '"""A module."""\ndef double(x):\n    """Twice."""\n    return 2 * x\n'
    words = '"""A module of numbers."""\n\n\ndef double(x):\n    return 2 * x  # twice\n'
    assert essence(before) == essence(words) != essence(words.replace("2 *", "3 *"))


def test_the_readme_says_when_and_of_what_code_its_promises_were_proved() -> None:
    promises = (ROOT / "README.md").read_text().split("## What it promises\n")[1].split("\n\n")[1]
    text = " ".join(promises.split())
    proved = {
        matrix: (int(figure.replace(",", "")), date, commit) for figure, matrix, date, commit in PROVED.findall(text)
    }
    measured = MEASURED.findall(text)
    assert len(proved) + len(measured) == len(re.findall(r"^- \*\*", promises, re.MULTILINE))
    rows = {row["matrix"]: row for row in PROOF}
    for matrix, (figure, date, commit) in proved.items():
        row = rows[matrix]
        counted = re.findall(r"(\d+) (?:kills|points)", row["tried"]) or re.findall(r"(\d+) passed", row["tests"])
        assert (sum(map(int, counted)), row["date"], row["commit"]) == (figure, date, commit)
    for name, date, commit in measured:
        assert f"\n{date},{commit}," in (ROOT / "benchmarks" / "results" / f"{name}.csv").read_text()


def test_every_matrix_has_its_row() -> None:
    assert {Path(row["matrix"]).name for row in PROOF} >= {Path(file).name for file in matrices()}


def test_a_row_follows_its_file_and_a_file_without_one_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.tables.FOLDER", tmp_path)
    monkeypatch.setattr("tests.prove.version", lambda name: "1")
    monkeypatch.setattr("tests.prove.shows", lambda file: f"shows {file}")
    values = ("tests/a/test_one.py", "one", "a", "3 passed", "", "1", "2026-11-25", "abc1234", "")
    new = dict(zip(COLUMNS, values, strict=True))
    write_rows(["tests/a/test_one.py"], new)
    write_rows(["tests/b/test_one.py", "tests/test_two.py"], {**new, "matrix": "tests/test_three.py"})
    assert read_rows("proof") == [
        {**new, "matrix": "tests/b/test_one.py", "packages": "b"},
        {**dict.fromkeys(COLUMNS, ""), "matrix": "tests/test_two.py", "what it shows": "shows tests/test_two.py"}
        | {"tests": NOT_RUN, "packages": "test_two"},
    ]
    files = ["tests/b/test_one.py", "tests/c/test_one.py"]  # of one name: each has the row of its own run
    write_rows(files, {**new, "matrix": files[1], "tests": "9 passed"})
    assert [(row["matrix"], row["tests"]) for row in read_rows("proof")] == [
        *zip(files, ("3 passed", "9 passed"), strict=True)
    ]


@pytest.mark.parametrize("row", PROOF, ids=[row["matrix"] for row in PROOF])
def test_a_row_is_marked_with_its_commit_or_with_a_reason(row: dict[str, str]) -> None:
    if row["tests"] == NOT_RUN:
        assert row["note"]
        return
    assert re.fullmatch(r"[0-9a-f]{7,}\*?", row["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"])
    if re.search(r"failure|error|skipped|did not run", row["tests"]) or row["commit"].endswith("*"):
        assert row["note"]
