"""Counts the bytes that loading reads from safetensors files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from stepmark.parallel.loading.tensor_source import FileTensor
from stepmark.sharding.layout import Box


@dataclass
class Reads:
    count: int = 0  # bytes


@contextmanager
def counted_reads() -> Iterator[Reads]:
    """While active, counts what tensors are read from files."""
    reads, original = Reads(), FileTensor._read_box

    def read(self: FileTensor, file: Any, box: Box, target: Any) -> None:
        reads.count += box.numel * self.dtype.itemsize
        original(self, file, box, target)

    with mock.patch.object(FileTensor, "_read_box", read):
        yield reads
