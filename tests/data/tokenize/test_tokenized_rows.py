"""Tokenized rows in memory and in a folder."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import pytest

from stepmark.data.tokenize.tokenized_rows import TokenizedRows, write_rows

CHANCE = random.Random(0)
ROWS = [
    ([CHANCE.randrange(70_000) for _ in range(length)], [CHANCE.random() < 0.2 for _ in range(length)])
    for length in (3, 1, 0, 7, 2, 12, 1, 5)
]


def mapped(folder: Path) -> TokenizedRows:
    files = write_rows(folder, "train-", iter(ROWS))
    assert sorted(files) == ["train-ids.bin", "train-lengths.bin", "train-targets.bin"]
    return TokenizedRows(folder, prefix="train-")


def test_rows_are_the_same_in_a_folder_and_in_another_process(tmp_path: Path) -> None:
    for rows in (TokenizedRows.of(iter(ROWS)), mapped(tmp_path), pickle.loads(pickle.dumps(mapped(tmp_path)))):
        assert len(rows) == len(ROWS)
        assert rows.longest == 12
        for number, (ids, targets) in enumerate(ROWS):
            found, counted = rows.row(number)
            assert (found.tolist(), counted.tolist()) == (ids, targets)


def test_a_pickled_copy_has_no_tokens(tmp_path: Path) -> None:
    rows = mapped(tmp_path)
    rows.row(0)
    assert len(pickle.dumps(rows)) < 1000


@pytest.mark.parametrize("longest", [1, 2, 3, 5, 12, 100])
def test_rows_with_a_target_that_is_predicted(longest: int) -> None:
    expected = [number for number, (_, targets) in enumerate(ROWS) if any(targets[1:longest])]
    assert TokenizedRows.of(ROWS).with_targets(longest).tolist() == expected


def test_no_rows(tmp_path: Path) -> None:
    write_rows(tmp_path, "", [])
    for rows in (TokenizedRows.of([]), TokenizedRows(tmp_path)):
        assert (len(rows), rows.longest, rows.with_targets(5).tolist()) == (0, 0, [])
