"""`_get_train_sampler` of a subclass gives the order, which a resumed run keeps; `ignore_data_skip` begins it again."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, Sampler, SequentialSampler
from transformers import TrainerCallback

from stepmark import Trainer, TrainingArguments
from stepmark.errors import UsageError
from tests.support.programs import Blocks, StopsAt, checksum, tiny_model
from tests.support.ranks import Ranks

HERE = "tests.trainer.compat.test_given_samplers"
SAMPLES = 14  # with two a step: 7 steps an epoch


class Noted(Blocks):
    """Counts the samples that it gives."""

    def __init__(self) -> None:
        super().__init__(SAMPLES)
        self.seen: list[int] = []

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.seen.append(index)
        return super().__getitem__(index)


class Backwards(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        return list(reversed(range(len(train_dataset))))  # type: ignore[return-value]


class WithoutDataset(Trainer):
    """As for transformers before 4.50."""

    def _get_train_sampler(self) -> Sampler[int]:  # type: ignore[override]
        return SequentialSampler(self.train_dataset)


class Usual(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        return super()._get_train_sampler(train_dataset)


class Unordered(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return None


def make(kind: type[Trainer], folder: Path | str, **options: Any) -> Trainer:
    dropout, data = options.pop("dropout", 0.1), options.pop("data", None)
    defaults: dict[str, Any] = {"max_steps": 10, "per_device_train_batch_size": 2, "learning_rate": 1e-3}
    defaults |= {"logging_steps": 1, "save_strategy": "no", "device": "cpu", "disable_tqdm": True}
    args = TrainingArguments(output_dir=str(folder), **defaults | options)
    return kind(tiny_model(dropout), args, train_dataset=data or Noted())


def order_of(trainer: Trainer, steps: int = 10) -> list[int]:
    trainer.train()
    seen: list[int] = trainer.train_dataset.seen
    return list(itertools.islice(seen, steps * 2))


@pytest.mark.parametrize(
    ("kind", "first"),
    [(Backwards, list(reversed(range(SAMPLES)))), (WithoutDataset, list(range(SAMPLES))), (Unordered, [*range(14)])],
)
def test_the_order_is_that_of_the_sampler(tmp_path: Path, kind: type[Trainer], first: list[int]) -> None:
    assert order_of(make(kind, tmp_path)) == [*first, *first[:6]]


def test_the_trainers_own_sampler_shuffles_as_the_seed_says(tmp_path: Path) -> None:
    orders = [order_of(make(Usual, tmp_path / str(run), seed=seed)) for run, seed in enumerate((1, 1, 2))]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0][:SAMPLES]) == list(range(SAMPLES))
    assert orders[0][:6] != orders[0][SAMPLES:]
    assert order_of(make(Usual, tmp_path / "s", train_sampling_strategy="sequential"))[:4] == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="^train_sampling_strategy: group_by_length has no sampler"):
        make(Usual, tmp_path / "g", train_sampling_strategy="group_by_length").train()


def test_what_is_not_a_sampler_is_refused(tmp_path: Path) -> None:
    kind = type("Numbered", (Trainer,), {"_get_train_sampler": lambda self: 3})
    with pytest.raises(UsageError, match="^_get_train_sampler: returned int, which is not a sampler"):
        make(kind, tmp_path).train()


class Begun(TrainerCallback):
    def __init__(self) -> None:
        self.epochs: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.epochs.append(round(state.epoch * 7) / 7)


@pytest.mark.parametrize("kind", [Usual, Trainer])
def test_a_resumed_run_continues_in_the_order_or_begins_the_epoch_again(tmp_path: Path, kind: type[Trainer]) -> None:
    whole = make(kind, tmp_path / "whole", save_strategy="steps", save_steps=4)
    whole.train()
    made = []
    for name, options in {"on": {}, "again": {"ignore_data_skip": True}}.items():
        shutil.copytree(tmp_path / "whole" / "checkpoint-4", tmp_path / name / "checkpoint-4")
        resumed, noted = make(kind, tmp_path / name, **options), Begun()
        resumed.add_callback(noted)
        resumed.train(resume_from_checkpoint=True)
        made.append((checksum(resumed), noted.epochs, resumed.state.global_step))
    assert made[0] == (checksum(whole), [step / 7 for step in range(5, 11)], 10)
    assert made[1][0] != checksum(whole)
    assert made[1][1:] == ([step / 7 for step in range(1, 7)], 10)


def test_an_epoch_that_was_complete_is_not_begun_again(tmp_path: Path) -> None:
    whole = make(Trainer, tmp_path / "whole", save_strategy="steps", save_steps=7)
    whole.train()
    shutil.copytree(tmp_path / "whole" / "checkpoint-7", tmp_path / "again" / "checkpoint-7")
    resumed = make(Trainer, tmp_path / "again", ignore_data_skip=True)
    resumed.train(resume_from_checkpoint=True)
    assert checksum(resumed) == checksum(whole)


class Told(Noted):
    """What `set_epoch` was called with, and something random that was drawn there."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int, float]] = []

    def set_epoch(self, epoch: int) -> None:
        self.told.append((epoch, random.random()))


class ToldStream(Told, IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(SAMPLES))


class ToldSampler(SequentialSampler):
    def __init__(self, dataset: Told) -> None:
        super().__init__(dataset)
        self.set_epoch = dataset.set_epoch


class OfPlainDataset(Trainer):
    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.train_dataset, 2)


class OfSampler(Trainer):
    def get_train_dataloader(self) -> Any:
        data: Any = self.train_dataset
        return torch.utils.data.DataLoader(Blocks(SAMPLES), batch_sampler=BatchSampler(ToldSampler(data), 2, False))


@pytest.mark.parametrize(
    ("kind", "data", "options"),
    [
        (Trainer, Told, {"dataloader_num_workers": 1}),
        (Trainer, Told, {"remove_unused_columns": False}),
        (Trainer, ToldStream, {}),
        (Backwards, Told, {}),
        (OfPlainDataset, Told, {}),
        (OfPlainDataset, ToldStream, {}),
        (OfSampler, Told, {}),
    ],
)
def test_what_wants_to_know_the_epoch_is_told_before_it_begins(
    tmp_path: Path, kind: type[Trainer], data: type[Told], options: dict[str, Any]
) -> None:
    """As accelerate's loaders do; the same in a run that goes on in mid-epoch, and not by evaluations."""
    found = []
    options = {"eval_strategy": "steps", "eval_steps": 1, **options}
    for stop, folder in ((10, "whole"), (9, "resumed"), (10, "resumed")):
        trainer = make(kind, tmp_path / folder, data=data(), save_strategy="steps", save_steps=9, **options)
        trainer.eval_dataset = trainer.train_dataset if data is Told else Blocks(3)
        trainer.add_callback(StopsAt(stop))
        trainer.train(resume_from_checkpoint=folder == "resumed")
        found.append(trainer.train_dataset.told)  # type: ignore[union-attr]
    assert [epoch for epoch, _ in found[0]] == [0, 1]
    assert found[1:] == [found[0], found[0][1:]]


def run(folder: str, batch: int) -> tuple[str, list[float]]:
    trainer = make(Backwards, folder, per_device_train_batch_size=batch, max_steps=6, dropout=0.0)
    trainer.train()
    return checksum(trainer), [log["loss"] for log in trainer.state.log_history if "loss" in log]


def test_two_ranks_take_the_samplers_batches_in_turn(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(f"{HERE}:run", str(tmp_path / "2"), 1, nproc=2).check()
    assert first == second
    (alone,) = ranks.run(f"{HERE}:run", str(tmp_path / "1"), 2).check()
    assert first[1] == pytest.approx(alone[1], rel=1e-5)
