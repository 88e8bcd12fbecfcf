"""Counts the bytes that loading reads from safetensors files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from stepmark.checkpoint.format.dtypes import item_size
from stepmark.parallel.loading import tensor_source
from stepmark.tensor_files.global_tensor import StoredArray


@dataclass
class Reads:
    count: int = 0  # bytes


@contextmanager
def counted_reads() -> Iterator[Reads]:
    """While active, counts what tensors are read from files."""
    reads, original = Reads(), tensor_source.read_array

    def read(array: StoredArray, target: Any) -> None:
        reads.count += array.numel * item_size(array.dtype)
        original(array, target)

    with mock.patch.object(tensor_source, "read_array", read):
        yield reads
