"""Plans in which some tensors come from the first rank alone, and files whose headers stay within bounds."""

from __future__ import annotations

import json

import pytest

from stepmark.checkpoint.format.checksums import CHECKSUM_BLOCK
from stepmark.checkpoint.format.tensor_file import header_size
from stepmark.checkpoint.save import plan as planning
from stepmark.checkpoint.save.plan import Holding, plan_save
from stepmark.checkpoint.sections import Row
from stepmark.sharding.layout import Piece


def row(name: str, numel: int, *, dtype: str = "F32", first: bool = False) -> Row:
    return Row("model", name, dtype, (numel,), Piece.whole((numel,)), first)


@pytest.mark.parametrize("nodes", [[0, 0, 0, 0], [0, 0, 1, 1], [1, 0, 1, 0]])
def test_the_first_rank_writes_them_whole(nodes: list[int]) -> None:
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
    assert all(loads)
    assert sum(len(file.tensors) for file in plan.files) == len(rows)


def test_a_header_stays_within_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MAX_HEADER", 100_000)
    names = ["x" * 100 + str(index) for index in range(300)] + ['"\\\U0001f600' * 20 + str(i) for i in range(100)]
    plan = plan_save([Holding(tuple(row(name, 5) for name in names), (0,))], [0], "s")
    assert len(plan.files) > 1
    assert all(file.header_size <= 100_000 + 4096 for file in plan.files)
    assert sum(len(file.tensors) for file in plan.files) == 400


@pytest.mark.parametrize("name", ["a", "layers.0.weight" * 9, "\U0001f600" * 40, '"\\' * 30, "\x00é" * 30])
def test_the_bound_of_a_header_holds(name: str) -> None:
    cut = Row(
        "model",
        name,
        "F32",
        (10**6, 10**6),
        Piece.of_range((10**6, 10**6), 5 * 10**11, 5 * 10**11 + 3 * CHECKSUM_BLOCK),
    )
    assert json.dumps(name)
    bound = planning.largest_header(cut.name, cut.shape, cut.nbytes)
    tensors = planning.order([cut[1:5]])
    assert header_size(tensors, "s") <= bound + 4096
