"""Changed checkpoints of other tools: each gives the right values or one clear error, and nothing outside OUT changes.

Zip archives have checksums, so a changed value is found there. Other bytes have none: there, names, shapes and what a
reader does are judged. A file may also be missing, empty, or there twice.
"""

from __future__ import annotations

import random
import resource
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from stepmark.errors import StepmarkError
from stepmark.interchange.recognition import open_foreign
from stepmark.interchange.sinks.stepmark_checkpoint import write_checkpoint
from stepmark.interchange.sources.foreign import ForeignCheckpoint, ImportOptions
from stepmark.model_folder.new_folder import WritingListener
from tests.support.foreign_checkpoints import WRITERS, truth

SILENT = WritingListener(lambda size: None, lambda size: None)
SLOW = 60.0  # seconds after which a change counts as a hang; an import takes a fraction of one
MEMORY = 256 << 10  # KiB that an import of a folder of a few hundred KiB may add to the most that was ever in use

assert transformers  # imported, a config that leaves something open takes no process of its own

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


def change_folder(source: Path, name: Path, draw: random.Random) -> str:
    """Changes a file of a checkpoint, or removes, empties or copies it; what was done."""
    path, kind = source / name, draw.random()
    if kind < 0.05:
        path.unlink()
        return "removed"
    if kind < 0.07:
        path.write_bytes(b"")
        return "emptied"
    if kind < 0.1:
        shutil.copy(path, path.with_name(draw.choice(("copy", "0", "model.bak", ".hidden")) + path.suffix))
        return "copied"
    change = draw.choice(CHANGES)
    path.write_bytes(change(path.read_bytes(), draw))
    return change.__name__


def check_values(found: ForeignCheckpoint, out: Path, values: bool) -> None:
    """What came of a checkpoint that was accepted: all names and shapes, and all values, unless the optimizer is said
    to be lost."""
    expected = truth()
    model = load_file(out / "model.safetensors")
    assert {name: tensor.shape for name, tensor in model.items()} == {n: t.shape for n, t in expected.model.items()}
    assert not values or all(torch.equal(model[name], tensor) for name, tensor in expected.model.items())
    if found.optimizer is None:
        assert any(text.startswith("optimizer:") for text in found.lost)
        return
    states = load_file(out / "optimizer" / "optimizer.safetensors")
    wanted = {f"{name}/{key}": value for name, one in expected.moments.items() for key, value in one.items()}
    assert {name: tensor.shape for name, tensor in states.items()} == {n: t.shape for n, t in wanted.items()}
    assert not values or all(torch.equal(states[name], value) for name, value in wanted.items())


def try_changes(tool: str, count: int, seed: int, folder: Path) -> int:
    """Returns how many of the changed checkpoints were refused."""
    good = WRITERS[tool](folder / "good", truth())
    files = [path.relative_to(good) for path in sorted(good.rglob("*")) if path.is_file() and path.stat().st_size]
    draw = random.Random(f"{tool} {seed}")
    refused = 0
    for number in range(count):
        source, out = folder / "changed", folder / "out"
        shutil.copytree(good, source)
        name = draw.choice(files)
        change = change_folder(source, name, draw)
        checked = zipfile.is_zipfile(good / name) or change in ("removed", "emptied", "copied")
        started, peak = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            found = open_foreign(source, ImportOptions())
            write_checkpoint(found, out, SILENT)
            check_values(found, out, checked)
        except StepmarkError as error:
            refused += 1
            assert "\n" not in str(error)
            assert len(str(error)) < 1500
            assert not out.exists(), number
        except AssertionError as error:
            raise AssertionError((tool, number, str(name), change)) from error
        assert time.monotonic() - started < SLOW, (tool, number, name, change)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < MEMORY, (tool, number, name, change)
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
def test_ten_thousand_changes(
    tool: str, seed: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    assert try_changes(tool, 200, seed, tmp_path) > 20
    record_property("changed folders", 200)
