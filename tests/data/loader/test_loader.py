"""The loader's batches and position: the same with workers and without, exact after resuming, clear when it fails."""

from __future__ import annotations

import errno
import functools
import itertools
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from stepmark.data.loader import fetcher
from stepmark.data.loader.batch import StepBatch
from stepmark.data.loader.labels import LabelRule
from stepmark.data.loader.loader import DataLoader
from stepmark.data.tokenize.packing import PackedBlocks
from stepmark.errors import CheckpointMismatch, DataError, UsageError
from stepmark.liveness.failure_report import is_permanent
from stepmark.trainer.loaders import used_columns

ROWS = [{"input_ids": torch.full((3,), index), "labels": torch.full((3,), index)} for index in range(11)]


def noisy(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A collator that draws from every generator there is."""
    return {
        "input_ids": torch.stack([row["input_ids"] for row in rows]),
        "noise": torch.rand(2) + random.random() + np.random.rand(),
    }


def flat(steps: Iterator[StepBatch] | DataLoader | list[StepBatch]) -> list[dict[str, Any]]:
    """Everything that is in steps, as plain values."""
    return [
        {"rows": micro.rows, "targets": micro.targets, "state": step.state, "epoch": step.epoch}
        | {name: value.tolist() for name, value in micro.inputs.items()}
        for step in steps
        for micro in step
    ]


def samples_of(steps: list[StepBatch]) -> list[int]:
    return [int(row[0]) for step in steps for micro in step for row in micro.inputs["input_ids"][: micro.rows]]


@pytest.mark.parametrize("collate_fn", [None, noisy])
@pytest.mark.parametrize("fixed_shape", [False, True])
def test_workers_change_nothing(collate_fn: Any, fixed_shape: bool) -> None:
    def batches(workers: int) -> list[dict[str, Any]]:
        loader = DataLoader(
            ROWS, 2, accumulation=2, num_workers=workers, collate_fn=collate_fn, fixed_shape=fixed_shape, seed=5
        )
        return flat(itertools.chain(loader, loader))

    alone = batches(0)
    assert batches(2) == alone
    if collate_fn:
        assert len({str(batch["noise"]) for batch in alone}) == len(alone)


def test_random_numbers_depend_on_the_position_alone() -> None:
    uninterrupted = flat(DataLoader(ROWS, 2, collate_fn=noisy))
    loader = DataLoader(ROWS, 2, collate_fn=noisy)
    steps = list(itertools.islice(loader, 2))
    resumed = DataLoader(ROWS, 2, collate_fn=noisy)
    resumed.load_state_dict(loader.state_dict())
    torch.rand(7)
    assert flat(steps) + flat(resumed) == uninterrupted


@pytest.mark.parametrize("workers", [0, 1])
def test_the_callers_generators_are_left_alone(workers: int) -> None:
    def states() -> tuple[Any, ...]:
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()

    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = states()
    list(DataLoader(ROWS, 2, collate_fn=noisy, num_workers=workers))
    assert states() == before


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_is_what_the_consumer_has_taken(workers: int) -> None:
    loader = DataLoader(ROWS, 2, num_workers=workers, seed=3)
    expected = [{"epoch": 0, "samples": samples} for samples in (2, 4, 6, 8, 10)] + [{"epoch": 1, "samples": 0}]
    for step, position in zip(loader, expected, strict=True):
        assert loader.state_dict() == step.state
        assert step.state == {**position, "dataset_size": 11, "seed": 3, "order": "shuffled-1"}
        assert step.epoch == position["epoch"] + position["samples"] / 11


@pytest.mark.parametrize("workers", [0, 2])
def test_stopping_and_resuming_takes_each_sample_once(workers: int) -> None:
    uninterrupted = samples_of(list(DataLoader(ROWS, 1, seed=1)))
    first = DataLoader(ROWS, 2, num_workers=workers, seed=1)
    taken = samples_of(list(itertools.islice(first, 2)))
    second = DataLoader(ROWS, 1, accumulation=3, num_workers=workers, seed=1)
    second.load_state_dict(first.state_dict())
    assert taken + samples_of(list(second)) == uninterrupted
    assert taken + samples_of(list(first)) == uninterrupted
    assert samples_of(list(first)) == samples_of(list(second)) != uninterrupted  # the next epoch


def test_fetching_ahead_leaves_the_position() -> None:
    loader = DataLoader(ROWS, 2)
    steps = list(itertools.islice(loader.ahead(), 3))
    assert loader.state_dict()["samples"] == 0
    loader.load_state_dict(steps[1].state)
    assert samples_of(steps[2:]) == samples_of(list(itertools.islice(loader, 1)))


class TestTheLastStep:
    """11 samples in steps of 8: three are left, which two ranks with two micro-steps of two rows share."""

    def last(self, rank: int, **arguments: Any) -> StepBatch:
        arguments = {"shuffle": False, "labels": LabelRule(causal_shift=True), **arguments}
        steps = list(DataLoader(ROWS, 2, rank=rank, world_size=2, accumulation=2, **arguments))
        assert len(steps) == 2
        assert steps[-1].samples == 3
        return steps[-1]

    def test_fixed_shapes_are_filled_with_rows_that_do_not_count(self) -> None:
        steps = [self.last(rank, fixed_shape=True) for rank in range(2)]
        assert [[micro.rows for micro in step] for step in steps] == [[2, 0], [1, 0]]
        assert [[micro.targets for micro in step] for step in steps] == [[4, 0], [2, 0]]
        for micro in itertools.chain(*steps):
            assert micro.inputs["input_ids"].shape == micro.inputs["labels"].shape == (2, 3)
            assert (micro.inputs["labels"][micro.rows :] == -100).all()
            assert torch.equal(micro.inputs["labels"][: micro.rows], micro.inputs["input_ids"][: micro.rows])
            assert micro.inputs["input_ids"].min() >= 0

    def test_free_shapes_are_smaller_but_never_empty(self) -> None:
        steps = [self.last(rank) for rank in range(2)]
        assert [[len(micro.inputs["labels"]) for micro in step] for step in steps] == [[2, 2], [1, 2]]
        assert [[micro.targets for micro in step] for step in steps] == [[4, 0], [2, 0]]

    @pytest.mark.parametrize("labels", [{}, {"labels": torch.rand}, {"labels": torch.zeros, "more_labels": torch.rand}])
    def test_rows_that_no_label_can_leave_out_are_not_added(self, labels: dict[str, Any]) -> None:
        """Only where a rank has no sample at all, and its batch therefore no weight."""

        def collate_fn(rows: list[Any]) -> dict[str, torch.Tensor]:
            return {"x": torch.rand(len(rows)), **{name: make(len(rows)) for name, make in labels.items()}}

        rule = LabelRule(("labels", "more_labels"))
        step = self.last(1, fixed_shape=True, collate_fn=collate_fn, labels=rule)
        assert [(micro.rows, micro.targets, len(micro.inputs["x"])) for micro in step] == [(1, None, 1), (0, None, 2)]
        again = self.last(1, fixed_shape=False, collate_fn=collate_fn, labels=rule)
        assert torch.equal(step[0].inputs["x"], again[0].inputs["x"])  # the same draws

    @pytest.mark.parametrize("rule", [LabelRule(skips_ignored=False), LabelRule(by_sample=True)])
    def test_rows_that_the_model_does_not_leave_out_are_not_added(self, rule: LabelRule) -> None:
        assert [len(micro.inputs["labels"]) for micro in self.last(1, fixed_shape=True, labels=rule)] == [1, 2]

    def test_labels_that_are_the_inputs_tensor(self) -> None:
        def collate_fn(rows: list[Any]) -> dict[str, torch.Tensor]:
            ids = torch.stack([row["input_ids"] for row in rows])
            return {"input_ids": ids, "labels": ids}

        micro = self.last(1, fixed_shape=True, collate_fn=collate_fn)[0]
        assert micro.inputs["input_ids"].min() >= 0
        assert micro.inputs["labels"][1].tolist() == [-100] * 3

    def test_a_collator_that_empties_its_samples(self) -> None:
        def collate_fn(rows: list[Any]) -> dict[str, torch.Tensor]:
            return {"input_ids": torch.stack([row.pop("input_ids") for row in rows])}  # and no labels

        rows = [dict(row) for row in ROWS]
        (step,) = DataLoader(rows[:1], 4, fixed_shape=True, collate_fn=collate_fn)
        assert step[0].inputs["input_ids"].shape == (1, 3)
        (step,) = DataLoader(rows[:1], 4, fixed_shape=True)
        assert step[0].inputs["labels"].shape == (4, 3)

    @pytest.mark.parametrize("fixed", [True, False])
    def test_a_batch_whose_rows_are_not_its_samples_is_not_filled(self, fixed: bool) -> None:
        """Samples joined to one row, or two rows of each; a rank without samples still has a batch, without targets."""
        for rows in (lambda count: 1, lambda count: 2 * count):
            shapes = lambda samples: {"labels": torch.ones(rows(len(samples)), 6, dtype=torch.long)}  # noqa: E731, B023
            step = self.last(1, fixed_shape=fixed, collate_fn=shapes)
            assert [(len(micro.inputs["labels"]), micro.rows, micro.filled) for micro in step] == [
                (rows(1), 1, False),
                (rows(2), 0, True),
            ]
            assert (step[1].inputs["labels"] == -100).all()

    def test_dropped(self) -> None:
        loader = DataLoader(ROWS, 4, drop_last=True, shuffle=False)
        assert loader.steps_per_epoch == len(loader) == 2
        assert samples_of(list(loader)) == list(range(8))
        assert loader.state_dict()["epoch"] == 1

    def test_dropped_where_less_than_a_step_is_left_after_resuming(self) -> None:
        small, large = DataLoader(ROWS, 4, shuffle=False), DataLoader(ROWS, 6, shuffle=False, drop_last=True)
        list(itertools.islice(small, 2))
        large.load_state_dict(small.state_dict())
        (step,) = large
        assert samples_of([step]) == list(range(6))
        assert large.state_dict()["epoch"] == 2


@pytest.mark.parametrize(
    ("changed", "name"), [({"seed": 1}, "seed"), ({"shuffle": False}, "order"), ({}, "dataset_size")]
)
def test_a_state_of_other_data_is_rejected(changed: dict[str, Any], name: str) -> None:
    state = DataLoader(ROWS, 2).state_dict()
    other = DataLoader(ROWS if changed else ROWS[1:], 2, **changed)
    with pytest.raises(CheckpointMismatch, match=f"data position: {name} was"):
        other.load_state_dict(state)


@pytest.mark.parametrize("position", [{"samples": 12}, {"samples": -1}, {"epoch": -1}])
def test_an_invalid_position_is_rejected(position: dict[str, int]) -> None:
    loader = DataLoader(ROWS, 2)
    with pytest.raises(CheckpointMismatch, match="is outside a dataset of 11 samples; the saved state is corrupted"):
        loader.load_state_dict({**loader.state_dict(), **position})


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "arguments", "kind", "message"),
    [
        (Stream(), {}, UsageError, "a Stream cannot be indexed"),
        ([], {}, DataError, "the dataset is empty"),
        ([1], {"drop_last": True}, DataError, "1 samples are fewer than one step's 2, .*or lower batch size"),
        ([1], {"rank": 1}, UsageError, "rank must be from 0 to 0"),
        ([1], {"seed": -1}, UsageError, "must not be negative"),
        ([1], {"num_workers": -1}, UsageError, "must not be negative"),
        ([1], {"accumulation": 0}, UsageError, "accumulation must be at least 1"),
    ],
)
def test_invalid_arguments(dataset: Any, arguments: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        DataLoader(dataset, 2, **arguments)


class Failing:
    """Sample 5 raises, or ends the process that reads it."""

    def __init__(self, deadly: bool = False) -> None:
        self.deadly = deadly

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            if self.deadly:
                os._exit(3)
            raise KeyError("no such\nfield")
        return torch.tensor(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_dataset_names_the_samples(workers: int) -> None:
    loader = DataLoader(Failing(), 2, shuffle=False, num_workers=workers)
    with pytest.raises(DataError, match=r"^samples 4, 5 could not be read \(KeyError") as caught:
        list(loader)
    assert "\n" not in str(caught.value)
    assert loader.state_dict()["samples"] == 4
    trace = caught.value.__notes__[0] if workers else str(caught.value.__cause__)
    assert "no such" in trace


def test_a_stepmark_error_in_a_worker_keeps_its_type() -> None:
    rows = [{"input_ids": [1] * length} for length in (1, 9)]
    with pytest.raises(DataError, match=r"^sample 1 has length 9"):
        list(DataLoader(rows, 1, shuffle=False, num_workers=1, pad_to=4))


class Unreadable(list[Any]):
    """A file whose server fails."""

    def __getitem__(self, index: Any) -> Any:
        raise DataError("the file cannot be read") from OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_read_that_fails_is_not_permanent_wherever_it_was(workers: int) -> None:
    with pytest.raises(DataError) as caught:
        list(DataLoader(Unreadable(ROWS), 2, num_workers=workers))
    assert not is_permanent(caught.value)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's handler of SIGCHLD raises
def test_a_worker_that_dies_is_an_error() -> None:
    before = set(multiprocessing.active_children())
    loader = DataLoader(Failing(deadly=True), 2, shuffle=False, num_workers=2)
    with pytest.raises(DataError, match="a data worker ended unexpectedly") as caught:
        list(loader)
    assert not is_permanent(caught.value)
    time.sleep(0.2)
    assert set(multiprocessing.active_children()) <= before  # nor does the other one stay


@pytest.mark.parametrize(
    ("number", "culprit"), [(errno.ENOSPC, "/dev/shm"), (errno.EMFILE, "ulimit -n"), (errno.EAGAIN, "ulimit -u")]
)
def test_workers_that_cannot_be_started_are_an_error_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, number: int, culprit: str
) -> None:
    """Their locks and queues are files in /dev/shm, and descriptors."""

    def refuse(_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(torch.utils.data.DataLoader, "__iter__", refuse)
    with pytest.raises(DataError, match=culprit) as caught:
        list(DataLoader(Failing(), 2, num_workers=1))
    assert not is_permanent(caught.value)


def test_batched_fetching_is_used_where_available() -> None:
    class Many(list[Any]):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self[index] for index in indices]

        def __getitem__(self, index: Any) -> Any:
            assert isinstance(index, int)
            return super().__getitem__(index)

    assert samples_of(list(DataLoader(Many(ROWS), 4))) == samples_of(list(DataLoader(ROWS, 4)))


def test_a_datasets_dataset() -> None:
    from datasets import Dataset

    rows = Dataset.from_dict({"input_ids": [[index] * (1 + index % 3) for index in range(7)]})
    assert sorted(samples_of(list(DataLoader(rows, 2, pad_to=4, num_workers=1)))) == list(range(7))


class Slow:
    """Rows that take a while."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(0.05)
        return ROWS[index]


def test_workers_ignore_the_signals_of_a_launcher() -> None:
    """It sends them to all processes of a job, and often several."""
    taken = []
    for batch in DataLoader(Slow(), 1, num_workers=2, shuffle=False):
        taken.append(batch)
        if len(taken) < 3:  # both have begun by then
            continue
        for worker in multiprocessing.active_children():
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGTERM)
    assert len(taken) == 8
    assert not multiprocessing.active_children()


def test_only_samples_that_may_draw_are_fetched_with_seeded_generators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeding three generators, and restoring them, takes longer than a batch of blocks."""
    keys, original = [], fetcher.seeded_generators
    monkeypatch.setattr(fetcher, "seeded_generators", lambda key, *_: keys.append(key) or original(key))
    np.arange(12, dtype=np.uint16).tofile(tmp_path / "ids")
    blocks = PackedBlocks(tmp_path / "ids", "uint16", 12, 3, 0)
    columns = functools.partial(used_columns, names=frozenset(ROWS[0]), model="Identity", others_read=False)
    for prepare in (None, columns):
        (step, *_) = DataLoader(blocks, 2, shuffle=False, prepare=prepare)
        assert step[0].inputs["input_ids"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert keys == []
    for dataset, collate_fn in ((ROWS, None), (blocks, noisy)):
        keys.clear()
        assert len(list(DataLoader(dataset, 2, collate_fn=collate_fn, prepare=columns))) == len(keys)
