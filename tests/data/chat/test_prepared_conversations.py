"""Conversations of a recipe: from files and datasets, tokenized once."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from stepmark.config.data_arguments import DataArguments
from stepmark.data.chat.conversations import Conversations
from stepmark.data.prepared_data import Prepared, prepare
from stepmark.errors import DataError, UsageError
from tests.data.chat.test_conversations import CHAT, MARKED, tokenizer

ROWS: list[dict[str, Any]] = [{"id": number, "messages": CHAT[: 2 + 2 * (number % 2)]} for number in range(20)]


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


def prepared(tmp_path: Path, *, template: str | None = None, **fields: Any) -> tuple[Prepared, list[str]]:
    said: list[str] = []
    words = tokenizer() if template is None else tokenizer(template)
    words.model_max_length = 64
    config = DataArguments(**{"messages_column": "messages", "block_size": 32, **fields})
    return prepare(config, words, folder=tmp_path / "cache", progress=said.append), said


def ids(data: Any) -> list[list[int]]:
    return [sample["input_ids"].tolist() for sample in data]


def test_samples_are_those_of_conversations_and_are_tokenized_once(tmp_path: Path, chats: Path) -> None:
    first, said = prepared(tmp_path, train_file=str(chats), assistant_only_loss=True)
    direct = Conversations(ROWS[1:], tokenizer(), max_length=32, assistant_only_loss=True)
    assert ids(first.train) == ids(direct)
    assert torch.equal(first.train[3]["labels"], direct[3]["labels"])
    assert first.fingerprint == direct.fingerprint
    assert ids(first.validation) == ids(Conversations(ROWS[:1], tokenizer()))
    assert said[-2:] == ["tokenized train: 19 conversations", "tokenized validation: 1 conversations"]
    again, said = prepared(tmp_path, train_file=str(chats), assistant_only_loss=True, packing=True)
    assert again.cached
    assert said[-2].startswith("cached train: 19 conversations packed into ")
    assert again.fingerprint != first.fingerprint


def test_the_cache_follows_the_template_the_column_and_the_targets(tmp_path: Path, chats: Path) -> None:
    file = {"train_file": str(chats), "validation_split_percentage": 0}
    prepared(tmp_path, **file)
    changed: list[dict[str, Any]] = [{"template": MARKED}, {"assistant_only_loss": True}]
    assert [prepared(tmp_path, **file, **more)[0].cached for more in changed] == [False, False]
    assert prepared(tmp_path, **file)[0].cached
    assert prepared(tmp_path, **file, block_size=8)[0].cached
    assert not prepared(tmp_path, **file, overwrite_cache=True)[0].cached


def test_what_is_cut_or_left_out_is_said(tmp_path: Path, chats: Path) -> None:
    _, said = prepared(
        tmp_path, train_file=str(chats), block_size=12, assistant_only_loss=True, validation_split_percentage=0
    )
    assert said[-1] == "tokenized train: 20 conversations; 10 cut to 12 tokens, 40 tokens left out"
    _, said = prepared(
        tmp_path, train_file=str(chats), block_size=12, max_train_samples=3, validation_split_percentage=0
    )
    assert said[-1].startswith("cached train: 3 conversations") or said[-1].startswith("tokenized train: 3 conv")


def test_rows_of_parquet_of_compressed_files_and_of_datasets(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(str(tmp_path / "saved"))
    rows.to_parquet(str(tmp_path / "chats.parquet"))
    (tmp_path / "chats.json.gz").write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    expected = ids(Conversations(ROWS, tokenizer(), max_length=32))
    for source in (
        {"dataset_name": str(tmp_path / "saved")},
        {"train_file": str(tmp_path / "chats.parquet")},
        {"train_file": str(tmp_path / "chats.json.gz")},
    ):
        assert ids(prepared(tmp_path, **source, validation_split_percentage=0)[0].train) == expected
    both = {"train_file": str(tmp_path / "chats.json.gz"), "validation_file": str(tmp_path / "chats.parquet")}
    found, _ = prepared(tmp_path, **both, max_eval_samples=4)
    assert (ids(found.train), ids(found.validation)) == (expected, expected[:4])


def test_instructions_need_no_messages(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(json.dumps({"instruction": "hello", "output": "fine"}) for _ in range(3)))
    found, _ = prepared(tmp_path, train_file=str(path), validation_split_percentage=0)
    assert len(found.train) == 3


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"dataset_name": "python-stdlib"}, UsageError, "^messages_column: python-stdlib has no conversations"),
        ({"train_file": "FILE", "text_column": "body"}, UsageError, "^text_column and messages_column: "),
        ({"train_file": "FILE", "messages_column": "chat"}, DataError, "row 2: has no chat, and no instruction"),
        ({"train_file": "TEXT"}, UsageError, r"notes.txt has a format that is not read; supported are .json, .jsonl"),
        ({"train_file": "FILE", "messages_column": None, "packing": True}, UsageError, "^packing: is for conversat"),
    ],
)
def test_what_does_not_fit_is_an_error(
    tmp_path: Path, chats: Path, fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    names = {"FILE": str(chats), "TEXT": str(tmp_path / "notes.txt")}
    with pytest.raises(error, match=message):
        prepared(tmp_path, **{name: names.get(str(value), value) for name, value in fields.items()})
