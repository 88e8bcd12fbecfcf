"""What is read of a checkpoint does not fill the page cache, but where other ranks of the node will read it too."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest
import torch

from stepmark import Checkpointer
from stepmark.checkpoint.format.verified_file import WINDOW, PageCacheEviction

SIZE = 2 * WINDOW + (WINDOW >> 1)
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


def test_a_window_leaves_when_all_of_it_has_been_read(cached: Path) -> None:
    passing = PageCacheEviction(cached)
    begins = list(range(0, 2 * WINDOW, BLOCK))
    for begin in begins[1::2] + begins[:-2:2]:  # all but the last but one block
        passing.has_read(begin, begin + BLOCK)
    assert 0.5 < resident(cached) < 0.7
    passing.has_read(2 * WINDOW - 2 * BLOCK, 2 * WINDOW - BLOCK)
    assert resident(cached) < 0.3
    passing.has_read(2 * WINDOW, 2 * WINDOW + 1)
    passing.close()
    assert resident(cached) < 0.05


def test_a_deleted_file_is_not_an_error(tmp_path: Path) -> None:
    passing = PageCacheEviction(tmp_path / "gone")
    passing.has_read(0, WINDOW)
    passing.has_read(WINDOW, WINDOW + 1)
    passing.close()


def test_a_restored_checkpoint_is_not_left_in_the_cache(cached: Path, tmp_path: Path) -> None:
    state = {"weights": torch.ones(WINDOW * 3 // 2 // 4)}
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"state": state}, block=True)
        checkpointer.restore({"state": state})
    (file,) = (tmp_path / "run" / "checkpoint-1").rglob("*.safetensors")
    assert resident(file) < 0.2
