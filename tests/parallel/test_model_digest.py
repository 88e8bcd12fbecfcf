"""The digest of a model's tensors: sums of slices add up on any mesh, and any change is seen."""

from __future__ import annotations

import pytest
import torch

from stepmark.parallel.model_digest import complete_digest, tensor_sum
from stepmark.parallel.tensor.plans import Placement, shard, shard_vocabulary
from stepmark.sharding.views import local_shard

WIDTH = 2**64
SHAPES = [(12, 18), (30,), (6, 4, 12), (24, 64)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8]


def total(tensor: torch.Tensor, placements: list[Placement]) -> int:
    sums = (tensor_sum(local_shard(tensor, each.layout, each.shape), each.layout) for each in placements)
    return sum(sums) % WIDTH


def example(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_of_shards_are_that_of_the_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = example(shape, dtype)
    tried = 0
    for ranks in (2, 3, 6):
        for dim in range(len(shape)):
            for packed in (1, 2, 3):
                if shape[dim] % (ranks * packed) == 0:
                    placements = [shard(shape, dim, rank, ranks, packed) for rank in range(ranks)]
                    assert total(tensor, placements) == tensor_sum(tensor, None) % WIDTH
                    tried += 1
    assert tried > 3


def test_padding_does_not_count() -> None:
    table = example((67, 8), torch.float32)
    placements = [shard_vocabulary((67, 8), rank, 4) for rank in range(4)]
    assert total(table, placements) == tensor_sum(table, None) % WIDTH


@pytest.mark.parametrize("shape", SHAPES)
def test_a_change_is_seen(shape: tuple[int, ...]) -> None:
    before = example(shape, torch.float32)
    added, exchanged = before.clone(), before.clone()
    added.view(-1)[5] += 1
    exchanged.view(-1)[5], exchanged.view(-1)[7] = before.view(-1)[7], before.view(-1)[5]
    digests = {complete_digest([("a", each)]) for each in (before, added, exchanged, before.reshape(-1, 2))}
    assert len({*digests, complete_digest([("b", before)])}) == 5


def test_the_digest_does_not_change_between_versions() -> None:
    assert tensor_sum(torch.tensor(3.5), None) == 874760404639678464
    assert tensor_sum(torch.tensor([True, False]), None) == -78654731313814661
