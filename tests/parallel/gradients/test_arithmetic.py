"""Norms of gradients are right whatever their size."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stepmark.parallel.gradients.arithmetic import LONG, norms, squares

CPU = torch.device("cpu")


@pytest.mark.parametrize("values", ["normal", "equal", "uneven"])
def test_norms_are_those_of_a_sum_in_float64(values: str) -> None:
    """torch's own is off by up to 2e-5 for 131,000 elements, and by 6e-4 for ten million."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(), (7,), (64,), (65,), (100,), (8191,), (10_000,), (131_000,), (1000, 1001), (10_000_019,)]
    tensors = [torch.randn(shape, generator=generator) * 1e-3 for shape in shapes]
    if values == "equal":
        tensors = [torch.full_like(each, 3e-4) for each in tensors]
    elif values == "uneven":
        tensors = [each * torch.rand(each.shape, generator=generator) ** 8 for each in tensors]
    tensors.append(tensors[-2].t())  # not contiguous
    exact = [torch.linalg.vector_norm(each.double()) for each in tensors]
    for found, right in zip(norms(tensors, long=0), exact, strict=True):
        assert float(found) == pytest.approx(float(right), rel=5e-7, abs=0)
    for tensor, found, right in zip(tensors, norms(tensors), exact, strict=True):
        if tensor.numel() >= LONG:
            assert float(found) == pytest.approx(float(right), rel=5e-7, abs=0)
    counts = [1, 2, 1, 1, 4, 1, 1, 2, 1, 1, 1]
    total = sum(float(right) ** 2 / count for right, count in zip(exact, counts, strict=True))
    assert float(squares(tensors, counts, CPU)) == pytest.approx(total, rel=1e-6)


def test_norms_of_short_tensors_are_torchs() -> None:
    tensors = [torch.randn(LONG - 1), torch.randn(3, 5).t(), torch.randn(())]
    assert torch.equal(torch.linalg.vector_norm(torch.stack(norms(tensors))), nn.utils.get_total_norm(tensors))


def test_of_nothing_there_is_no_norm() -> None:
    assert norms([]) == []
    assert squares([], [], CPU).tolist() == [0.0]
