"""Norms of gradients are right whatever their size."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stepmark.parallel.gradient_math import LONG, norms, squares

CPU = torch.device("cpu")


def test_norms_of_long_tensors_are_exact() -> None:
    """torch's own is off by 8e-5 for the first one."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2000, 2001), (3 * LONG + 1,), (LONG,), (LONG - 1,), (7,), ()]
    tensors = [torch.randn(shape, generator=generator) * 1e-3 for shape in shapes]
    tensors.append(tensors[0].t())  # not contiguous
    exact = [torch.linalg.vector_norm(each.double()) for each in tensors]
    for found, right in zip(norms(tensors), exact, strict=True):
        assert float(found) == pytest.approx(float(right), rel=5e-7)
    counts = [1, 2, 1, 1, 4, 1, 1]
    total = sum(float(right) ** 2 / count for right, count in zip(exact, counts, strict=True))
    assert float(squares(tensors, counts, CPU)) == pytest.approx(total, rel=1e-6)


def test_norms_of_short_tensors_are_torchs() -> None:
    tensors = [torch.randn(LONG - 1), torch.randn(3, 5)]
    assert torch.equal(torch.linalg.vector_norm(torch.stack(norms(tensors))), nn.utils.get_total_norm(tensors))
    assert norms([]) == []
