"""Samples grouped by length: every sample once, little padding, the same order on any mesh and after resuming."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

from stepmark.data.loader.batch import StepBatch
from stepmark.data.loader.collate import PadTo, sample_lengths
from stepmark.data.loader.loader import DataLoader
from stepmark.data.loader.order import LengthGroups
from stepmark.errors import CheckpointMismatch, UsageError

SIZE = 203
LENGTHS = np.random.Generator(np.random.Philox(1)).integers(1, 100, SIZE)
ROWS = [{"input_ids": torch.full((int(length),), index)} for index, length in enumerate(LENGTHS)]


def loader(batch: int = 4, **options: Any) -> DataLoader:
    return DataLoader(ROWS, batch, collate_fn=PadTo(), lengths=options.pop("lengths", LENGTHS), **options)


def samples_of(steps: Iterable[StepBatch]) -> list[list[int]]:
    """The samples of each step."""
    return [
        [int(row[0]) for micro in step for row in micro.inputs["input_ids"][: micro.rows].tolist()] for step in steps
    ]


def padding_of(steps: Iterable[list[int]]) -> float:
    """The share of tokens that are padding."""
    rows = [[int(LENGTHS[index]) for index in step] for step in steps]
    padded = sum(len(lengths) * max(lengths) for lengths in rows)
    return 1 - sum(map(sum, rows)) / padded


def test_an_epoch_has_every_sample_once_the_longest_first_and_little_padding() -> None:
    made = loader()
    first, second = samples_of(made), samples_of(made)
    for epoch in (first, second):
        assert sorted(itertools.chain(*epoch)) == list(range(SIZE))
        assert LENGTHS[epoch[0][0]] == LENGTHS.max()
        assert padding_of(epoch) < 0.15 < 0.3 < padding_of(samples_of(DataLoader(ROWS, 4, collate_fn=PadTo())))
    assert first != second
    assert samples_of(loader(seed=1)) != first


def test_ranks_share_steps_of_the_same_samples() -> None:
    alone = samples_of(loader(8))
    ranks = [samples_of(loader(2, rank=rank, world_size=2, accumulation=2)) for rank in range(2)]
    for step, parts in zip(alone, zip(*ranks, strict=True), strict=True):
        assert sorted(step) == sorted(itertools.chain(*parts))


@pytest.mark.parametrize("batch", [4, 1, 10])
def test_a_resumed_epoch_has_every_sample_once_with_any_batch_size(batch: int) -> None:
    made = loader()
    taken = samples_of(itertools.islice(made, 21))
    resumed = loader(batch)
    resumed.load_state_dict(made.state_dict())
    rest = samples_of(resumed)
    assert sorted(itertools.chain(*taken, *rest)) == list(range(SIZE))
    if batch == 4:
        assert rest == samples_of(made)
        assert samples_of(resumed) == samples_of(made)  # the next epoch


def test_a_position_among_other_lengths_or_in_another_order_is_refused() -> None:
    state = loader().state_dict()
    with pytest.raises(CheckpointMismatch, match="^data position: lengths was '"):
        loader(lengths=LENGTHS + 1).load_state_dict(state)
    with pytest.raises(CheckpointMismatch, match="^data position: order was 'grouped-1 shuffled-1'"):
        DataLoader(ROWS, 4, collate_fn=PadTo()).load_state_dict(state)
    with pytest.raises(CheckpointMismatch, match="^data position: order was 'shuffled-1'"):
        loader().load_state_dict(DataLoader(ROWS, 4, collate_fn=PadTo()).state_dict())


def test_workers_and_a_second_loader_change_nothing() -> None:
    made = loader()
    expected = samples_of(made)
    assert samples_of(loader(num_workers=2)) == expected
    assert samples_of(made.again()) == expected
    assert made.state_dict()["epoch"] == 1


@pytest.mark.parametrize(("samples", "steps"), [(3, 1), (31, 1), (64, 4), (5000, 50)])
def test_groups_are_of_whole_steps(samples: int, steps: int) -> None:
    assert LengthGroups.of(np.ones(samples, np.int64), 4).size == 4 * steps


def test_equal_lengths_keep_the_shuffled_order() -> None:
    assert samples_of(loader(lengths=np.ones(SIZE, np.int64))) == samples_of(DataLoader(ROWS, 4, collate_fn=PadTo()))


def test_lengths_are_those_of_a_column_or_of_what_the_model_takes() -> None:
    import datasets

    rows = [{"input_ids": [0] * size, "tokens": 10 - size, "name": "x"} for size in (3, 1, 2)]
    table = datasets.Dataset.from_list(rows)
    assert sample_lengths(table, "tokens", "input_ids").tolist() == [7, 9, 8]
    assert sample_lengths(table, "length", "input_ids").tolist() == [3, 1, 2]
    assert sample_lengths(table.with_format("torch"), "tokens", "input_ids").tolist() == [7, 9, 8]
    assert sample_lengths(rows, "tokens", "input_ids").tolist() == [3, 1, 2]
    with pytest.raises(UsageError, match="^length_column_name: the column 'name' should hold whole numbers"):
        sample_lengths(table, "name", "input_ids")
    for wrong in (rows, [(1, 2)]):
        with pytest.raises(UsageError, match="^train_sampling_strategy: group_by_length needs samples with 'pixels'"):
            sample_lengths(wrong, "length", "pixels")


def test_lengths_of_other_samples_are_refused() -> None:
    with pytest.raises(UsageError, match="^lengths: should be one for each sample"):
        loader(lengths=LENGTHS[:5])
    with pytest.raises(UsageError, match="^lengths: should be one for each sample, of a dataset that is shuffled"):
        loader(shuffle=False)
