"""Where a benchmark ran, and where its results are kept."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch


def machine() -> str:
    """One line: versions, processor, the load that was there already, date."""
    load = os.getloadavg()[0]
    return (
        f"torch {torch.__version__}, {os.cpu_count()} cores {platform.machine()}, load {load:.1f} at the end, "
        f"{time.strftime('%Y-%m-%d')}"
    )


def write_results(name: str, table: str, data: dict[str, Any], *, folder: Path) -> None:
    """Writes the table as markdown, and the numbers as JSON."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.md").write_text(table + "\n")
    (folder / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
