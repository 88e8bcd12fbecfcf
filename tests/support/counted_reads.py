"""Counts the bytes that loading reads from safetensors files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from stepmark.parallel.loading.tensor_source import SafetensorsSource


@dataclass
class Reads:
    count: int = 0  # bytes


@contextmanager
def counted_reads() -> Iterator[Reads]:
    """While active, counts what tensors are read from files."""
    reads, original = Reads(), SafetensorsSource._read

    def read(self: SafetensorsSource, descriptor: int, memory: memoryview, offset: int) -> Any:
        reads.count += len(memory)
        return original(self, descriptor, memory, offset)

    with mock.patch.object(SafetensorsSource, "_read", read):
        yield reads
