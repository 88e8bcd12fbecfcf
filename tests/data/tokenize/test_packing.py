"""Which samples share a block."""

from __future__ import annotations

import random

import pytest

from stepmark.data.tokenize.packing import pack


@pytest.mark.parametrize("seed", range(20))
def test_every_sample_is_in_one_block_that_has_room_for_it(seed: int) -> None:
    chance = random.Random(seed)
    capacity = chance.randint(1, 200)
    lengths = [chance.randint(1, capacity) for _ in range(chance.randint(0, 300))]
    blocks = pack(lengths, capacity)
    assert sorted(index for block in blocks for index in block) == list(range(len(lengths)))
    filled = [sum(lengths[index] for index in block) for block in blocks]
    assert max(filled, default=0) <= capacity
    assert sum(one * 2 <= capacity for one in filled) <= 1  # two half-empty blocks would have been one
    assert len(blocks) <= 11 / 9 * -(-sum(lengths) // capacity) + len(lengths) / 3 + 1
    assert blocks == sorted(sorted(block) for block in blocks)


def test_a_sample_goes_where_it_leaves_the_least_room() -> None:
    assert pack([7, 3, 6, 4, 10], 10) == [[0, 1], [2, 3], [4]]
    assert pack([6, 5, 4, 5], 10) == [[0, 2], [1, 3]]
    assert pack([], 10) == []
