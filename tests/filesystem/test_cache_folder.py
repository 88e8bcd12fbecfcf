"""Where what can be made again is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepmark.filesystem.cache_folder import cache_root


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STEPMARK_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "own"
    monkeypatch.delenv("STEPMARK_CACHE")
    assert cache_root() == tmp_path / "xdg" / "stepmark"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "stepmark"
