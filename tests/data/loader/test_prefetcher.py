"""The feed moves steps ahead in one thread, and the position follows the consumer."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from stepmark.data.loader.loader import DataLoader
from stepmark.data.loader.prefetcher import DevicePrefetcher
from stepmark.errors import DataError

ROWS = [{"input_ids": torch.full((2,), index)} for index in range(10)]


class FakeRuntime:
    """Places batches by marking them, and remembers which, and in which thread."""

    def __init__(self, device: str = "meta", fails_at: int | None = None) -> None:
        self.device = torch.device(device)
        self.fails_at = fails_at
        self.placed: list[int] = []
        self.threads: set[threading.Thread] = set()

    def place(self, batch: Any) -> Any:
        self.threads.add(threading.current_thread())
        if self.fails_at == len(self.placed):
            raise MemoryError("device is full")
        self.placed.append(int(batch[0]["input_ids"][0, 0]))
        return [{**inputs, "placed": True} for inputs in batch]


def feed_of(runtime: FakeRuntime, rows: Any = ROWS, lookahead: int = 2, **arguments: Any) -> DevicePrefetcher:
    loader = DataLoader(rows, 1, accumulation=2, shuffle=False, **arguments)
    return DevicePrefetcher(loader, runtime, lookahead)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_every_step_arrives_placed_and_in_order(device: str, workers: int) -> None:
    feed = feed_of(FakeRuntime(device), num_workers=workers)
    plain = list(DataLoader(ROWS, 1, accumulation=2, shuffle=False))
    for step, expected in zip(feed, plain, strict=True):
        assert all(micro.inputs.pop("placed") for micro in step)
        assert str(step) == str(expected)
        assert feed.loader.state_dict() == expected.state
    assert feed.loader.state_dict()["epoch"] == 1


@pytest.mark.parametrize(("lookahead", "ahead"), [(0, 0), (1, 1), (3, 3)])
def test_lookahead_is_limited(lookahead: int, ahead: int) -> None:
    runtime = FakeRuntime()
    feed = feed_of(runtime, lookahead=lookahead)
    steps = iter(feed)
    next(steps)
    assert feed.loader.state_dict()["samples"] == 2
    steps.close()  # type: ignore[attr-defined]  # waits for what is being moved
    assert runtime.placed[0] == 0
    assert runtime.placed == sorted(runtime.placed)
    assert set(runtime.placed) <= {0, 2, 4, 6} - {2 * number for number in range(1 + ahead, 4)}  # closing drops some


def test_one_thread_moves_and_ends_with_the_epoch() -> None:
    runtime = FakeRuntime()
    list(feed_of(runtime))
    (mover,) = runtime.threads
    assert mover is not threading.main_thread()
    assert not mover.is_alive()


def test_a_cpu_needs_no_thread_and_fetches_nothing_ahead() -> None:
    runtime = FakeRuntime("cpu")
    next(iter(feed_of(runtime)))
    assert runtime.placed == [0]
    assert runtime.threads == {threading.main_thread()}


def test_stopping_early_leaves_the_position_where_the_consumer_is() -> None:
    runtime = FakeRuntime()
    feed = feed_of(runtime)
    for number, _ in enumerate(feed):
        if number == 1:
            break
    assert feed.loader.state_dict()["samples"] == 4
    assert not any(thread.is_alive() for thread in runtime.threads)
    assert int(next(iter(feed))[0].inputs["input_ids"][0, 0]) == 4


def test_collators_run_in_the_calling_thread() -> None:
    def collate_fn(rows: list[Any]) -> dict[str, Any]:
        assert threading.current_thread() is threading.main_thread()
        return {"input_ids": rows[0]["input_ids"][None]}

    assert len(list(feed_of(FakeRuntime(), collate_fn=collate_fn))) == 5


def test_an_error_in_the_thread_reaches_the_consumer_at_its_step() -> None:
    runtime = FakeRuntime(fails_at=2)
    feed = feed_of(runtime)
    with pytest.raises(MemoryError, match="device is full"):
        list(feed)
    assert feed.loader.state_dict()["samples"] == 4
    assert not any(thread.is_alive() for thread in runtime.threads)


def test_an_error_in_fetching_reaches_the_consumer_at_its_step() -> None:
    feed = feed_of(FakeRuntime(), rows=[*ROWS[:4], {"input_ids": [1, 2, 3]}, *ROWS[5:]], pad_to=2)
    taken = []
    with pytest.raises(DataError, match="sample 4 has length 3"):
        taken.extend(feed)
    assert feed.loader.state_dict()["samples"] == 4


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_batches_of_another_loader_arrive_placed_and_in_order(device: str, lookahead: int) -> None:
    class Runtime(FakeRuntime):
        def place(self, batch: Any) -> Any:
            self.threads.add(threading.current_thread())
            return {**batch, "placed": True}

    runtime = Runtime(device)
    loader: Any = torch.utils.data.DataLoader(ROWS, batch_size=4)
    feed = DevicePrefetcher(loader, runtime, lookahead)  # type: ignore[arg-type]
    for _ in range(2):
        found = list(feed)
        assert [batch["input_ids"][:, 0].tolist() for batch in found] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert all(batch["placed"] for batch in found)
    assert len(feed) == 3
    assert (threading.current_thread() in runtime.threads) == (device == "cpu" or not lookahead)


def test_an_error_of_another_loader_is_raised_where_it_happens() -> None:
    def batches() -> Any:
        yield [{"input_ids": torch.zeros(1, 1)}]
        raise DataError("no more")

    feed = iter(DevicePrefetcher(batches(), FakeRuntime()))  # type: ignore[arg-type]
    next(feed)
    with pytest.raises(DataError, match="no more"):
        next(feed)
