"""Plans, and the shard of each parameter that a rank holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepmark.errors import UsageError
from stepmark.parallel.tensor.plans import Placement, Style, parse_style, plan_of, shard, shard_vocabulary
from stepmark.sharding.views import local_shard
from tests.support.models import EXPERTS, build


def held(whole: torch.Tensor, placement: Placement) -> torch.Tensor:
    return local_shard(whole, placement.layout, placement.shape)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 1))
def test_packed_projections_are_sharded_one_by_one(size: int, packed: int, part: int, dim: int) -> None:
    shape = [5, 5]
    shape[dim] = packed * part * size
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    for rank in range(size):
        expected = [projection.chunk(size, dim)[rank] for projection in whole.chunk(packed, dim)]
        assert torch.equal(held(whole, shard(tuple(shape), dim, rank, size, packed)), torch.cat(expected, dim))


@given(st.integers(1, 40), st.integers(1, 6))
def test_a_vocabulary_is_padded_with_zeros(rows: int, size: int) -> None:
    whole = torch.arange(1, rows + 1)
    parts = [held(whole, shard_vocabulary((rows,), rank, size)) for rank in range(size)]
    assert len({len(part) for part in parts}) == 1
    joined = torch.cat(parts)
    assert torch.equal(joined[:rows], whole)
    assert not joined[rows:].any()


def test_neighbours_share_heads() -> None:
    whole = torch.arange(6)
    parts = [held(whole, shard((6,), 0, rank, 4, copies=2)).tolist() for rank in range(4)]
    assert parts == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]
    assert shard((6,), 0, 0, 4, copies=2).count == 2


def test_styles_give_the_number_of_packed_projections() -> None:
    assert parse_style("packed_colwise") == Style("colwise", 2)
    assert parse_style("packed_rowwise:3") == Style("rowwise", 3)
    assert parse_style("colwise_gather_output") == Style("colwise_gather_output")


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3", *EXPERTS])
def test_models_have_plans(kind: str) -> None:
    model = build(kind)
    styles = plan_of(model)
    assert set(styles) <= {name for name, _ in (*model.named_modules(), *model.named_parameters())}
    assert {style.kind for style in styles.values()} >= {"colwise", "rowwise"}
    assert ("moe_tp_experts" in {style.kind for style in styles.values()}) == (kind in EXPERTS)


class NoPlan(torch.nn.Module):
    pass


@pytest.mark.parametrize(
    ("model", "plan", "words"),
    [
        (NoPlan(), None, "NoPlan has no tensor parallel plan"),
        (NoPlan(), {"up": "columnwise"}, "columnwise"),
        (NoPlan(), {"up": "colwise"}, "no module or parameter 'up'"),
    ],
)
def test_plans_that_cannot_be_used(model: Any, plan: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        plan_of(model, plan)
