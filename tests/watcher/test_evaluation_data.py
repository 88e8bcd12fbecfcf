"""Which texts --data names: all of files and folders, the validation part of what has one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from stepmark.config.recipe import read_recipe
from stepmark.data.tokenize.tokenizer import load_tokenizer
from stepmark.errors import StepmarkError, UsageError
from stepmark.evaluation.run_options import RunOptions
from stepmark.watcher.evaluation_data import EvaluationSet, Request, prepare_sets
from stepmark.watcher.setup import options_of

LINES = [f"{number:03d} is a number of this line" for number in range(200)]
TEXT = "".join(f"{line}\n" for line in LINES)


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Reads one set with a recipe's fields, or without a recipe (None)."""
    monkeypatch.setenv("STEPMARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def sets(source: str, fields: dict[str, Any] | None = None, **given: Any) -> EvaluationSet:
        recipe = None
        if fields is not None:
            model = {"output_dir": "out", "config_name": "gpt2", "tokenizer_name": "bytes"}
            recipe = read_recipe(None, {name: str(value) for name, value in {**model, **fields}.items()})
        request = Request(tmp_path, data=[source], block_size=32, **given)
        request.check()
        return prepare_sets(request, options_of(recipe, tmp_path), recipe, load_tokenizer("bytes"), None)[None]

    return sets


def bytes_in(found: EvaluationSet) -> int:
    """How many tokens are predicted or given, without those that fill the last block."""
    return sum(int((found.blocks[index]["labels"] >= 0).sum()) for index in range(len(found.blocks)))


def test_a_run_may_name_its_columns_by_source() -> None:
    options = RunOptions(columns={"assistant_only_loss": True})
    assert Request(Path("run")).columns(options) == {"assistant_only_loss": True}
    with pytest.raises(UsageError, match="--assistant_only_loss: is for conversations; give --messages_column"):
        Request(Path("run"), data=["chats.jsonl"]).columns(options)


def test_a_folder_is_read_completely(read: Any) -> None:
    Path("texts").mkdir()
    for part in range(4):
        Path(f"texts/{part}.txt").write_text("".join(f"{line}\n" for line in LINES[50 * part : 50 * part + 50]))
    Path("one.txt").write_text(TEXT)
    alone = read("one.txt")
    for source, fields in (("texts", None), ("texts", {"train_file": "one.txt"}), ("texts/*.txt", None)):
        found = read(source, fields)
        assert bytes_in(found) == pytest.approx(bytes_in(alone), abs=8)  # with the ends of four documents
        assert found.source == source
        assert bytes_in(found) > len(TEXT) - 8
    assert len(read("texts", max_samples=3).blocks) == 3


@pytest.mark.parametrize("validation", [True, False])
def test_a_saved_dataset_with_and_without_a_validation_split(read: Any, validation: bool) -> None:
    rows = datasets.Dataset.from_dict({"text": LINES})
    part = datasets.Dataset.from_dict({"text": LINES[:7]})
    splits = {"train": rows, **({"validation": part} if validation else {})}
    datasets.DatasetDict(splits).save_to_disk("saved")
    Path("other.txt").write_text(TEXT)
    for fields in (None, {"train_file": "other.txt"}):
        found = read("saved", fields)
        expected = 7 if validation else 200
        assert bytes_in(found) == pytest.approx(expected * (len(LINES[0]) + 1), abs=8)
        assert found.source == ("the validation part of saved" if validation else "saved")


def test_a_dataset_that_is_one_split_is_read_completely(read: Any) -> None:
    datasets.Dataset.from_dict({"text": LINES}).save_to_disk("saved")
    assert bytes_in(read("saved")) == pytest.approx(200 * (len(LINES[0]) + 1), abs=8)


def test_what_the_run_trains_on_is_left_out(read: Any) -> None:
    datasets.Dataset.from_dict({"text": LINES}).save_to_disk("saved")
    own = read("saved", {"dataset_name": str(Path("saved").resolve()), "validation_split_percentage": 10})
    assert bytes_in(own) == pytest.approx(20 * (len(LINES[0]) + 1), abs=8)
    assert own.source == "the validation part of saved"


def test_tables_of_which_some_are_for_validation(read: Any) -> None:
    Path("tables").mkdir()
    for name, lines in (("train-0", LINES), ("validation-0", LINES[:9])):
        Path(f"tables/{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    assert bytes_in(read("tables")) == pytest.approx(9 * (len(LINES[0]) + 1), abs=8)


def test_columns_of_the_run_are_nothing_to_plain_text(read: Any) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps({"body": line, "title": "x"}) + "\n" for line in LINES))
    Path("texts").mkdir()
    Path("texts/a.txt").write_text(TEXT)
    run = {"train_file": "rows.jsonl", "text_column": "body"}
    assert bytes_in(read("texts", run)) > len(TEXT) - 8
    assert bytes_in(read("rows.jsonl", run)) > 200 * len(LINES[0]) - 8
    with pytest.raises(StepmarkError, match="title"):
        read("rows.jsonl")
    assert read("rows.jsonl", text_column="body").content == read("rows.jsonl", run).content


def test_text_and_conversations_are_two_things(read: Any) -> None:
    with pytest.raises(UsageError, match="--text_column and --messages_column"):
        read("python-stdlib", text_column="a", messages_column="b")
