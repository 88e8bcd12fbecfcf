"""Headless Chromium: a page after its script has run, and pictures of it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 120.0


def chromium() -> str:
    """The browser's program; skips the test where there is none (.ci/run installs it)."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium is installed")
    return found


def _run(page: Path | str, *flags: str, size: tuple[int, int], real_time: bool = False) -> bytes:
    with tempfile.TemporaryDirectory() as profile:
        command = [
            chromium(),
            "--headless=new",
            "--no-sandbox",
            # Starting four took longer than most pages; but one alone never ends a picture.
            *([] if any(flag.startswith("--screenshot") for flag in flags) else ["--single-process"]),
            "--disable-gpu",
            "--hide-scrollbars",
            *([] if real_time else ["--virtual-time-budget=5000"]),
            f"--user-data-dir={profile}",
            f"--window-size={size[0]},{size[1]}",
            *flags,
            page.resolve().as_uri() if isinstance(page, Path) else page,
        ]
        return subprocess.run(command, capture_output=True, timeout=SECONDS, check=True).stdout


def dump_dom(page: Path | str, size: tuple[int, int] = (1280, 900), *flags: str, real_time: bool = False) -> str:
    """The elements of a file or an address as they are once its script has run, and five seconds later by a clock that
    stands still while the script runs; in real time at once."""
    return _run(page, "--dump-dom", *flags, size=size, real_time=real_time).decode()


DARK = "--blink-settings=preferredColorScheme=0"
_SCRIPT = """<pre id="results"></pre><script>
setTimeout(async () => {{
  const results = {{}};
  const soon = (seconds = 0.1) => new Promise((done) => setTimeout(done, seconds * 1000));
  const mouse = (element, kind, x, y = 60) => {{
    const box = element.getBoundingClientRect();
    const at = {{ clientX: box.left + x * box.width, clientY: box.top + y, bubbles: true, buttons: 1, movementX: 1 }};
    element.dispatchEvent(new MouseEvent(kind, at));
  }};
  try {{
{script}
  }} catch (error) {{ results.error = String(error.stack); }}
  document.getElementById("results").textContent = JSON.stringify(results);
}}, 1000);
</script></body>"""


def act(page: Path, script: str, size: tuple[int, int] = (1280, 900), *flags: str) -> dict[str, Any]:
    """Runs a script in a copy of the page, once all is drawn, and returns what it has put into `results`. It may use
    `mouse(element, kind, x)`, x being a share of the element's width, and `await soon()`."""
    copy = page.with_name(f"acting-{page.name}")
    copy.write_text(page.read_text().replace("</body>", _SCRIPT.format(script=script)))
    found = re.search(r'<pre id="results">(.*?)</pre>', dump_dom(copy, size, *flags), flags=re.DOTALL)
    assert found is not None
    results: dict[str, Any] = json.loads(html.unescape(found[1]))
    assert "error" not in results, results["error"]
    return results


def screenshot(page: Path, picture: Path, size: tuple[int, int], *, dark: bool = False) -> None:
    """Writes a PNG of the page in a window of this size."""
    scheme = [DARK] if dark else []
    _run(page, f"--screenshot={picture.resolve()}", *scheme, size=size)
