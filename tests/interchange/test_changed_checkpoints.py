"""Changed checkpoints of other tools: each gives the right values or one clear error, and nothing outside OUT changes.

Zip archives have checksums, so a changed value is found there. Other bytes have none: there, only names, shapes and
what a reader does are judged.
"""

from __future__ import annotations

import random
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stepmark.errors import StepmarkError
from stepmark.interchange.foreign import ImportOptions
from stepmark.interchange.import_checkpoint import ImportListener, write_checkpoint
from stepmark.interchange.recognition import open_foreign
from tests.support.foreign_checkpoints import WRITERS, truth

SILENT = ImportListener(lambda size: None, lambda size: None)
SLOW = 60.0  # seconds after which a change counts as a hang; an import takes a fraction of one
MEMORY = 256 << 10  # KiB that an import of a folder of a few hundred KiB may add to the most that was ever in use

Change = Callable[[bytes, random.Random], bytes]


def flip(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 8))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def fill(data: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(data))
    return data[:start] + bytes(draw.choice((0, 255)) for _ in range(64)) + data[start + 64 :]


def repeat(data: bytes, draw: random.Random) -> bytes:
    start, end = sorted(draw.randrange(len(data)) for _ in range(2))
    return data[:end] + data[start : min(end, start + 4096)] + data[end:]


def opcodes(data: bytes, draw: random.Random) -> bytes:
    """Changes near the beginning, where pickles and headers are."""
    head = min(len(data), 4096)
    changed = bytearray(data)
    for _ in range(4):
        changed[draw.randrange(head)] = draw.choice(b"(RbtcsuN}].\x94\x93\x81\x85hqU\x8c0e")
    return bytes(changed)


CHANGES: tuple[Change, ...] = (flip, cut, fill, repeat, opcodes)


def try_changes(tool: str, count: int, seed: int, folder: Path) -> int:
    """Returns how many of the changed checkpoints were refused."""
    good = WRITERS[tool](folder / "good", truth())
    files = [path.relative_to(good) for path in sorted(good.rglob("*")) if path.is_file() and path.stat().st_size]
    draw = random.Random(f"{tool} {seed}")
    refused = 0
    for number in range(count):
        source, out = folder / "changed", folder / "out"
        shutil.copytree(good, source)
        name, change = draw.choice(files), draw.choice(CHANGES)
        (source / name).write_bytes(change((good / name).read_bytes(), draw))
        started, peak = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            write_checkpoint(open_foreign(source, ImportOptions()), out, SILENT)
        except StepmarkError as error:
            refused += 1
            assert "\n" not in str(error)
            assert len(str(error)) < 1500
            assert not out.exists(), number
        assert time.monotonic() - started < SLOW, (tool, number, name, change.__name__)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < MEMORY, (tool, number, name, change.__name__)
        assert {path.name for path in folder.iterdir()} <= {"good", "changed", "out"}
        shutil.rmtree(source)
        shutil.rmtree(out, ignore_errors=True)
    return refused


@pytest.mark.parametrize("tool", list(WRITERS))
def test_a_sample_of_changes(tool: str, tmp_path: Path) -> None:
    assert try_changes(tool, 12, 0, tmp_path) > 0


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(1, 11))
@pytest.mark.parametrize("tool", list(WRITERS))
def test_ten_thousand_changes(tool: str, seed: int, tmp_path: Path) -> None:
    assert try_changes(tool, 200, seed, tmp_path) > 20
