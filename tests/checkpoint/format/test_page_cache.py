"""What is read of a checkpoint does not fill the page cache, but where other ranks of the node will read it too."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest
import torch

from stepmark import Checkpointer
from stepmark.checkpoint.format.block_io import read_block

SIZE = 64 << 20
BLOCK = 2 << 20


def resident(path: Path) -> float:
    """The share of a file's pages that are in the page cache."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE) as mapped:
        pages = (len(mapped) + mmap.PAGESIZE - 1) // mmap.PAGESIZE
        found = (ctypes.c_ubyte * pages)()
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert (
            ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), found)
            == 0
        )
        return sum(page & 1 for page in found) / pages


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """A file that is on the disk, and completely in the page cache."""
    path = tmp_path / "file"
    path.write_bytes(bytes(SIZE))
    descriptor = os.open(path, os.O_RDWR)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    if resident(path):
        pytest.skip("this file system keeps its files in memory")
    path.read_bytes()
    assert resident(path) > 0.95
    return path


def test_what_has_been_read_leaves(cached: Path) -> None:
    memory = memoryview(bytearray(BLOCK))
    for begin in range(BLOCK, SIZE, 2 * BLOCK):
        read_block(cached, memory, begin, passing=True)
    assert 0.4 < resident(cached) < 0.7
    for begin in range(0, SIZE, 2 * BLOCK):
        read_block(cached, memory, begin)
    assert resident(cached) > 0.4
    for begin in range(0, SIZE, 2 * BLOCK):
        read_block(cached, memory, begin, passing=True)
    assert resident(cached) < 0.2


def test_a_restored_checkpoint_is_not_left_in_the_cache(cached: Path, tmp_path: Path) -> None:
    state = {"weights": torch.ones(SIZE // 4)}
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"state": state}, block=True)
        checkpointer.restore({"state": state})
    (file,) = (tmp_path / "run" / "checkpoint-1").rglob("*.safetensors")
    assert resident(file) < 0.2
