"""Norms of gradients are right whatever their size."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from stepmark.parallel.gradients.arithmetic import LONG, count_squares, halved, norms, squares, value_of

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


def by_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The norm of rows of 64, of the norms of 64 rows each, and so on; what is left of a row is with the next norms."""
    flat = tensor.reshape(-1)
    while len(flat) > 64:
        cut = len(flat) // 64 * 64
        flat = torch.cat([torch.linalg.vector_norm(flat[:cut].view(-1, 64), dim=1), flat[cut:]])
    return torch.linalg.vector_norm(flat)


@pytest.mark.parametrize("shape", [(), (1,), (63,), (64,), (65,), (4096,), (4097,), (64**3,), (100, 999), (3, 64, 64)])
def test_the_bits_of_a_norm_are_those_of_each_tensor_alone(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    others = [torch.randn(7), torch.randn(LONG, 3)]
    for each in (tensor, tensor.t()) if len(shape) == 2 else (tensor,):
        assert torch.equal(norms([*others, each], long=0)[-1], by_rows(each))
        alone = by_rows(each) if each.numel() >= LONG else torch.linalg.vector_norm(each)
        assert torch.equal(norms([*others, each])[-1], alone)


def test_of_nothing_there_is_no_norm() -> None:
    assert norms([]) == []
    assert squares([], [], CPU).tolist() == [0.0]


def counted(tensors: list[torch.Tensor]) -> float:
    return float(value_of(count_squares(tensors, CPU)))


def test_counted_squares_are_the_same_however_tensors_are_divided() -> None:
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(64 * 1000, generator=generator) * torch.exp(8 * torch.randn(64 * 1000, generator=generator))
    whole = counted([flat])
    for cuts in ([64, 640], [64 * 999], [64 * each for each in range(1, 1000, 7)]):
        parts = list(flat.tensor_split(cuts))
        assert counted(parts) == whole
        assert counted(parts[::-1]) == whole
        of_ranks = torch.stack([count_squares([part], CPU) for part in parts])
        assert float(value_of(of_ranks.flip(0).sum(0))) == float(value_of(of_ranks.sum(0))) == whole


@pytest.mark.parametrize("columns", [1, 5, 64, 100])
def test_counted_squares_are_the_same_however_rows_are_divided(columns: int) -> None:
    rows = torch.randn(300, columns, generator=torch.Generator().manual_seed(3))
    whole = counted([rows])
    for cuts in ([1], [100, 200], list(range(0, 300, 7))):
        assert counted(list(rows.tensor_split(cuts))) == whole
    assert whole == pytest.approx(float(rows.double().square().sum()), rel=1e-6)


@pytest.mark.parametrize("scale", [1e-22, 1e-3, 1.0, 1e15])
@pytest.mark.parametrize("shape", [(), (63,), (64,), (1000, 1001), (10_000_019,)])
def test_counted_squares_are_those_of_a_sum_in_float64(shape: tuple[int, ...], scale: float) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * scale
    right = float(tensor.double().square().sum())
    assert counted([tensor]) == pytest.approx(right, rel=1e-6 if scale > 1e-20 else 0.1, abs=0)


def test_counted_squares_of_numbers_that_are_not_finite_are_not() -> None:
    assert counted([torch.tensor([1.0, float("inf")])]) == float("inf")
    assert math.isnan(counted([torch.tensor([1.0, float("nan")])]))
    assert counted([torch.full((64,), 1e30)]) == float("inf")  # in float32
    assert counted([]) == counted([torch.zeros(3)]) == 0.0


def test_devices_add_pieces_in_the_same_order() -> None:
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(halved(rows).double(), rows.double().sum(1), rtol=0, atol=1e-5)
    assert torch.equal(halved(rows)[2:3], halved(rows[2:3]))
