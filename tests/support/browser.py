"""Headless Chromium: a page after its script has run, and pictures of it."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 120.0


def chromium() -> str:
    """The browser's program; skips the test where there is none (.ci/run installs it)."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium is installed")
    return found


def _run(page: Path, *flags: str, size: tuple[int, int]) -> bytes:
    with tempfile.TemporaryDirectory() as profile:
        command = [
            chromium(),
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--virtual-time-budget=5000",
            f"--user-data-dir={profile}",
            f"--window-size={size[0]},{size[1]}",
            *flags,
            page.resolve().as_uri(),
        ]
        return subprocess.run(command, capture_output=True, timeout=SECONDS, check=True).stdout


def dump_dom(page: Path, size: tuple[int, int] = (1280, 900)) -> str:
    """The page's elements as they are once its script has run."""
    return _run(page, "--dump-dom", size=size).decode()


def screenshot(page: Path, picture: Path, size: tuple[int, int], *, dark: bool = False) -> None:
    """Writes a PNG of the page in a window of this size."""
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    _run(page, f"--screenshot={picture.resolve()}", *scheme, size=size)
