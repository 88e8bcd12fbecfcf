"""Conversions without torch give what torch gives, and checksums of parts that of the whole."""

from __future__ import annotations

import itertools
import random
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from stepmark.checkpoint.format.dtypes import item_size, torch_dtype
from stepmark.interchange.sinks.hf_trainer import cpu_generator_state
from stepmark.tensor_files.conversion import FLOATS, convert, number
from stepmark.tensor_files.torch_writer import _RunningChecksum

SPECIAL = [0.0, -0.0, 1.0, 1 + 2**-8, 1 + 3 * 2**-9, 65504.0, 65520.0, 3.4e38, 1e-40, 1e-8, float("inf"), -float("inf")]


def values(dtype: str) -> torch.Tensor:
    """Every kind of number: any bits at all, and those that conversions stumble over."""
    generator = torch.Generator().manual_seed(7)
    bits = torch.randint(0, 256, (4096 * item_size(dtype),), dtype=torch.uint8, generator=generator)
    special = torch.tensor([*SPECIAL, float("nan")], dtype=torch.float64).to(torch_dtype(dtype))
    return torch.cat([bits.view(torch_dtype(dtype)), special])


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(FLOATS, 2)))
def test_conversions_are_those_of_torch(source: str, target: str) -> None:
    drawn = values(source)
    memory = np.empty(len(drawn) * item_size(target), dtype=np.uint8)
    exact = convert(as_bytes(drawn), source, target, memory)
    found, expected = torch.from_numpy(memory).view(torch_dtype(target)), drawn.to(torch_dtype(target))
    assert torch.equal(found.isnan(), expected.isnan())
    assert as_bytes(found[~found.isnan()]).tobytes() == as_bytes(expected[~expected.isnan()]).tobytes()
    assert exact == (item_size(source) < item_size(target))
    kept = expected.to(drawn.dtype)[~drawn.isnan()]
    again = np.empty(kept.numel() * item_size(target), dtype=np.uint8)
    assert convert(as_bytes(kept), source, target, again)  # what went there and back is held exactly


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "I64", "U64", "I32", "U32", "I16", "U16", "I8", "U8"])
def test_a_number_is_that_of_torch(dtype: str) -> None:
    tensor = torch.tensor([3], dtype=torch_dtype(dtype))
    found = number(as_bytes(tensor).tobytes(), dtype)
    assert (found, type(found)) == (tensor.item(), type(tensor.item()))


def test_checksums_of_parts_from_several_threads_are_those_of_the_whole() -> None:
    draw = random.Random(3)
    data = draw.randbytes(300_000)
    bounds = sorted({0, len(data), *(draw.randrange(len(data)) for _ in range(40))})
    found = _RunningChecksum()
    with ThreadPoolExecutor(4) as pool:
        for begin, end in itertools.pairwise(bounds):
            pool.submit(found.add, begin, memoryview(data)[begin:end])
    assert found.crc == zlib.crc32(data)


def test_no_thread_waits_for_a_part_that_cannot_be_read() -> None:
    found = _RunningChecksum()
    with ThreadPoolExecutor(2) as pool:
        waits = pool.submit(found.add, 10, memoryview(b"x"))
        found.add(0, None)
        waits.result(timeout=10)


@pytest.mark.parametrize("seed", [0, 10, 1 << 31, (1 << 33) + 5])
def test_a_generator_is_that_of_torch(seed: int) -> None:
    assert cpu_generator_state(seed) == as_bytes(torch.Generator().manual_seed(seed).get_state()).tobytes()
