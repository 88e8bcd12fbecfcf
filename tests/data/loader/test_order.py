"""Every sample once an epoch, in an order that no mesh changes: arithmetic, over meshes that change on the way."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.data.loader.loader import DataLoader
from stepmark.data.loader.order import BatchLayout, Epoch, SamplePosition, sample_order
from stepmark.errors import UsageError

LAYOUTS = st.builds(BatchLayout, st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))


class Numbers:
    """Sample i is i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return int(index)


def loaders(size: int, layout: BatchLayout, **arguments: object) -> list[DataLoader]:
    """One for each rank."""
    return [
        DataLoader(
            Numbers(size),
            layout.batch_size,
            rank=rank,
            world_size=layout.world_size,
            accumulation=layout.accumulation,
            collate_fn=list,
            **arguments,  # type: ignore[arg-type]
        )
        for rank in range(layout.world_size)
    ]


def global_steps(ranks: list[DataLoader]) -> Iterator[list[int]]:
    """The real samples of each step, in the order that the layout gives them over ranks and micro-steps."""
    for steps in zip(*ranks, strict=True):
        assert len({(step.samples, step.epoch, str(step.state)) for step in steps}) == 1
        taken = [
            sample
            for micro_step in range(len(steps[0]))
            for step in steps
            for sample in step[micro_step].inputs[: step[micro_step].rows]
        ]
        assert len(taken) == steps[0].samples
        yield taken


@given(st.integers(1, 60), st.integers(0, 2**40), LAYOUTS, st.booleans())
def test_an_epoch_is_the_order_of_its_seed_on_any_mesh(size: int, seed: int, layout: BatchLayout, fixed: bool) -> None:
    ranks = loaders(size, layout, seed=seed, fixed_shape=fixed)
    for epoch in range(2):
        taken = [sample for step in global_steps(ranks) for sample in step]
        assert taken == sample_order(size, seed, epoch, shuffle=True).tolist()
        assert sorted(taken) == list(range(size))


@given(st.integers(1, 40), st.lists(st.tuples(LAYOUTS, st.integers(1, 6)), min_size=1, max_size=5), st.integers(0, 9))
def test_every_sample_once_whatever_changes_between_steps(
    size: int, phases: list[tuple[BatchLayout, int]], seed: int
) -> None:
    """Each phase takes a few steps on a different mesh, and the next one starts from its saved state."""
    state = None
    taken: list[int] = []
    for layout, count in [*phases, (BatchLayout(7), 10**6)]:
        ranks = loaders(size, layout, seed=seed)
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        for _, step in zip(range(count), global_steps(ranks), strict=False):
            taken += step
        state = ranks[0].state_dict()
    assert state["samples"] == 0
    epochs = state["epoch"]
    assert len(taken) == epochs * size
    for epoch in range(epochs):
        assert taken[epoch * size : (epoch + 1) * size] == sample_order(size, seed, epoch, shuffle=True).tolist()


@given(st.integers(1, 60), LAYOUTS)
def test_micro_batches_follow_the_layout(size: int, layout: BatchLayout) -> None:
    rows = layout.batch_size
    for rank, loader in enumerate(loaders(size, layout, shuffle=False)):
        for number, step in enumerate(loader):
            begin = number * layout.global_batch
            for micro_step, micro_batch in enumerate(step):
                first = begin + (micro_step * layout.world_size + rank) * rows
                expected = [sample for sample in range(first, first + rows) if sample < size]
                assert micro_batch.inputs[: micro_batch.rows] == expected
                assert len(micro_batch.inputs) == (len(expected) or rows)


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 60), st.booleans())
def test_walking_agrees_with_counting(size: int, global_batch: int, taken: int, drop_last: bool) -> None:
    epoch = Epoch(size, global_batch, drop_last)
    if not epoch.steps():
        return
    start = epoch.begin(SamplePosition(3, min(taken, size)))
    walked = list(epoch.walk(start))
    assert len(walked) == epoch.steps(start.samples) > 0
    assert walked[-1][2] == SamplePosition(start.epoch + 1, 0)
    covered = sum(samples for _, samples, _ in walked)
    left = size - start.samples
    assert covered == (left - left % global_batch if drop_last else left)
    assert [after for _, _, after in walked[:-1]] == [position for position, _, _ in walked[1:]]


def test_orders_differ_by_epoch_and_seed_and_are_stable() -> None:
    orders = {tuple(sample_order(50, seed, epoch, shuffle=True)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert sample_order(5, 0, 0, shuffle=False).tolist() == [0, 1, 2, 3, 4]
    # Kept from the first release on: a run must resume in the same order after any upgrade.
    assert sample_order(10, 7, 3, shuffle=True).tolist() == STABLE
    assert sample_order(10, 7, 3, shuffle=True).dtype == np.int64


STABLE = [8, 7, 0, 3, 4, 5, 2, 6, 1, 9]


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, -1, 1), (1, 1, 0)])
def test_sizes_are_positive(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError, match="must be at least 1"):
        BatchLayout(*sizes)
