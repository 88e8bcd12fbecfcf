"""A mount that remembers missing names: what is listed and cannot be opened yet is tried again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from stepmark.filesystem import visibility
from stepmark.filesystem.visibility import is_listed, when_visible


def test_a_listed_file_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "late"
    path.write_text("here")
    tries: list[int] = []

    def read() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise FileNotFoundError(2, "No such file", str(path))
        return path.read_text()

    assert when_visible(read, path) == "here"
    assert len(tries) == 3


def test_a_file_that_is_not_listed_is_missing_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visibility.time, "sleep", pytest.fail)
    with pytest.raises(FileNotFoundError):
        when_visible((tmp_path / "gone").read_text, tmp_path / "gone")
    assert not is_listed(tmp_path / "no-folder" / "gone")


def test_the_time_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "never"
    path.touch()

    def read() -> Any:
        raise FileNotFoundError(2, os.strerror(2), str(path))

    with pytest.raises(FileNotFoundError):
        when_visible(read, path, patience=0.3)
