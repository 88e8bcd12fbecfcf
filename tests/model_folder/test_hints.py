"""What the hint to `stepmark import` takes for a checkpoint of another tool."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepmark.model_folder.hints import import_hint
from tests.support.foreign_checkpoints import WRITERS, truth


@pytest.mark.parametrize("tool", list(WRITERS))
def test_every_tool_s_checkpoint_has_a_hint(tool: str, tmp_path: Path) -> None:
    source = WRITERS[tool](tmp_path / "source", truth())
    hint = import_hint(source, "out")
    assert hint is not None
    assert f"stepmark import {source} out" in hint


def test_what_is_no_checkpoint_has_none(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "model.txt").write_text("a model")
    assert import_hint(tmp_path / "notes", "out") is None
    assert import_hint(tmp_path / "nothing", "out") is None


def test_a_checkpoint_of_ours_has_none(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert import_hint(tmp_path, "out") is not None
    (tmp_path / "manifest.json").touch()
    assert import_hint(tmp_path, "out") is None
