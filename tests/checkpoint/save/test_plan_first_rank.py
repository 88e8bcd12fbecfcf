"""Plans in which some tensors come from the first rank alone; and headers that stay within bounds."""

from __future__ import annotations

import pytest

from stepmark.checkpoint.format.checksums import CHECKSUM_BLOCK
from stepmark.checkpoint.format.tensor_file import header_size
from stepmark.checkpoint.save import plan as planning
from stepmark.checkpoint.save.plan import Holding, Row, plan_save
from stepmark.sharding.layout import TensorSlice


def row(name: str, numel: int, *, dtype: str = "F32", first: bool = False) -> Row:
    return Row("model", name, dtype, (numel,), TensorSlice.full((numel,)), first)


@pytest.mark.parametrize("nodes", [[0, 0, 0, 0], [0, 0, 1, 1], [1, 0, 1, 0]])
def test_the_first_rank_writes_all_of_them(nodes: list[int]) -> None:
    rows = []
    for layer in range(6):
        rows.append(row(f"{layer}.weight", 3_000_000))
        rows.append(row(f"{layer}.mean", 300_000, first=True))
        rows.append(row(f"{layer}.count", 1, dtype="I64", first=True))
    plan = plan_save([Holding(tuple(rows), (0, 1, 2, 3))], nodes, "s")
    loads = [0] * 4
    for file in plan.files:
        position = 0
        for share in file.shares:
            assert share.begin == position
            assert share.end == file.data_size or share.end % CHECKSUM_BLOCK == 0
            position = share.end
            loads[share.rank] += share.end - share.begin
        assert position == file.data_size
        for tensor in file.tensors:
            writers = {s.rank for s in file.shares if s.begin < tensor.end and tensor.begin < s.end}
            assert "weight" in tensor.name or writers == {0}, tensor.name
    assert tuple(loads) == plan.loads
    assert max(loads) - min(loads) <= 0.2 * sum(loads) / 4 + CHECKSUM_BLOCK
    for file in plan.files:  # what comes from the first rank has separate files
        assert len({"weight" in tensor.name for tensor in file.tensors}) == 1
    assert sum(len(file.tensors) for file in plan.files) == len(rows)


def test_one_rank_has_one_file() -> None:
    plan = plan_save([Holding((row("weight", 10), row("mean", 10, first=True)), (0,))], [0], "s")
    assert [file.name for file in plan.files] == ["model.safetensors"]


@pytest.mark.parametrize(
    "name", ["layers.0.weight", "layers.0.weight" * 9, "\U0001f600" * 120, '"\\' * 60, "\x00é" * 500]
)
def test_a_full_file_has_a_header_that_others_read(name: str) -> None:
    """Of the largest number of tensors with such names: measured for a hundredth of them."""
    names = [f"{name}{index}" for index in range(planning.MAX_TENSORS + 1)]
    plan = plan_save([Holding(tuple(row(name, 5) for name in names), (0,))], [0], "s")
    assert len(plan.files) > 1
    assert sum(len(file.tensors) for file in plan.files) == len(names)
    largest = max(plan.files, key=lambda file: len(file.tensors))
    sample = largest.tensors[: len(largest.tensors) // 100]
    assert 100 * header_size(sample, "s") < 100_000_000
