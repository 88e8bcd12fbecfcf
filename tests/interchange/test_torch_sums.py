"""Sums of files in torch's format: those we write are right, and a file without any is not taken for a damaged one."""

from __future__ import annotations

import errno
import os
import random
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stepmark import load
from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint import single_file as plain
from stepmark.errors import CheckpointDamaged, CheckpointError
from stepmark.interchange import gather
from stepmark.interchange.consolidate import ConsolidationListener, consolidate
from stepmark.interchange.sums import combine
from tests.support.corruption import flip_bit


def consolidated(folder: Path, model: nn.Module) -> Path:
    with Checkpointer(folder / "run") as checkpointer:
        checkpointer.save(1, {"model": model}, block=True)
    quiet = ConsolidationListener(lambda size: None, lambda size: None, lambda text: None)
    consolidate(folder / "run", folder / "out", "pytorch", 10**9, quiet)
    return folder / "out" / "pytorch_model.bin"


def test_a_consolidated_file_has_sums_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "BLOCK", 1 << 20)  # several blocks to a tensor
    model = nn.Sequential(nn.Linear(1000, 1001), nn.Linear(3, 1))
    model.register_buffer("empty", torch.zeros(0, 4))
    model.register_buffer("brain", torch.randn(7).bfloat16())
    path = consolidated(tmp_path, model)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    loaded = load(path)
    assert all(tensor.equal(loaded[name]) for name, tensor in model.state_dict().items())
    weight = model.state_dict()["0.weight"].numpy().tobytes()
    flip_bit(path, path.read_bytes().index(weight) + 3_000_001)
    with pytest.raises(CheckpointDamaged, match="data/"):
        load(path)


def test_files_without_sums_are_not_damaged(tmp_path: Path) -> None:
    state, path = {"a": torch.arange(999.0), "b": torch.ones(3)}, tmp_path / "a.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert load(path)["a"].equal(state["a"])
    with torch.serialization.skip_data():  # as consolidation once left them: sums of all but the tensors
        torch.save(state, path)
    assert set(load(path)) == {"a", "b"}
    with path.open("r+b") as file:
        file.truncate(3000)
    with pytest.raises(CheckpointDamaged):
        load(path)


def test_a_sum_that_is_wrong_is_damage_though_it_is_the_only_one_of_a_tensor(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"t": torch.arange(1000.0)}, path)
    flip_bit(path, path.read_bytes().index(torch.arange(1000.0).numpy().tobytes()) + 100)
    with pytest.raises(CheckpointDamaged, match="data/0"):
        load(path)


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EACCES, errno.EIO])
def test_what_cannot_be_read_for_the_moment_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = tmp_path / "a.pt"
    torch.save({"t": torch.zeros(9)}, path)

    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(plain.zipfile.ZipFile, "open", fail)
    with pytest.raises(CheckpointError, match=os.strerror(number)) as caught:
        load(path)
    assert isinstance(caught.value, CheckpointDamaged) == (number == errno.EIO)


def test_sums_of_runs_are_put_together() -> None:
    generator = random.Random(0)
    for length in (0, 1, 2, 31, 255, 4096, 70_001):
        one, other = generator.randbytes(generator.randrange(100)), generator.randbytes(length)
        assert combine(zlib.crc32(one), zlib.crc32(other), length) == zlib.crc32(one + other)
