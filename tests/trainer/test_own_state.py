"""Data and loaders of users that draw random numbers or keep a count: what a resumed run trains."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from stepmark import Trainer, TrainingArguments
from tests.support.programs import VOCABULARY, StopsAt, checksum, tiny_model
from tests.support.ranks import Ranks

SAMPLES, STEPS = 10, 12  # five steps an epoch on one rank


def sample(index: int, drawn: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.tensor([index, drawn % VOCABULARY, 1, 2])
    return {"input_ids": ids, "labels": ids}


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return sample(index)


class Drawing(Rows):
    def __getitem__(self, index: int) -> Any:
        return sample(index, random.randrange(VOCABULARY) + int(torch.randint(VOCABULARY, ())))


class CountsByRank(Rows):
    read = 0

    def __getitem__(self, index: int) -> Any:
        self.read += 1 + int(os.environ.get("RANK", "0"))
        return sample(index)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return map(sample, range(SAMPLES))


class Restores:
    """Batches whose position is saved, as torchdata's are."""

    def __init__(self, data: Any, num_workers: int = 0) -> None:
        self.data, self.dataset, self.batch, self.num_workers = data, data, 0, num_workers

    def __len__(self) -> int:
        return SAMPLES // 2

    def __iter__(self) -> Iterator[Any]:
        while self.batch < len(self):
            self.batch += 1
            yield stack([self.data[2 * self.batch - 2], self.data[2 * self.batch - 1]])
        self.batch = 0

    def state_dict(self) -> dict[str, int]:
        return {"batch": self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batch = state["batch"]


def stack(rows: list[Any]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def masked(rows: list[Any]) -> dict[str, torch.Tensor]:
    batch = stack(rows)
    batch["input_ids"][:, 2] = torch.tensor([random.randrange(VOCABULARY) for _ in rows])
    return batch


def persistent(data: Any) -> Any:
    options = {"shuffle": True, "num_workers": 1, "persistent_workers": True, "collate_fn": stack}
    return torch.utils.data.DataLoader(data, 2, **options)


# By name: the dataset, the collator, and the loader.
CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any] | None]] = {
    "a stream's collator draws": (Stream, masked, None),
    "persistent workers draw": (Drawing, stack, persistent),
    "a loader with a state draws": (Drawing, stack, Restores),
    "a loader with a state and workers": (Rows, stack, lambda data: Restores(data, num_workers=1)),
    "ranks count differently": (CountsByRank, stack, None),
}


class Sees(Trainer):
    make: Callable[[Any], Any] | None = None

    def get_train_dataloader(self) -> Any:
        return super().get_train_dataloader() if self.make is None else self.make(self.train_dataset)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        self.seen.append(inputs["input_ids"].tolist())
        return super().training_step(model, inputs, num_items_in_batch)


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def train(folder: str, name: str, stop: int | None = None) -> tuple[list[Any], str, list[str]]:
    """What each step was trained on, the checksum of the weights, and the warnings."""
    data, collator, make = CASES[name]
    options: dict[str, Any] = {"max_steps": STEPS, "per_device_train_batch_size": 2, "save_steps": 3, "device": "cpu"}
    args = TrainingArguments(folder, disable_tqdm=True, **options)
    callbacks: list[Any] = [StopsAt(stop)]
    trainer = Sees(tiny_model(0.0), args, data_collator=collator, train_dataset=data(), callbacks=callbacks)
    trainer.make, trainer.seen, warnings = make, [], Warnings()
    logging.getLogger("stepmark").addHandler(warnings)
    try:
        trainer.train(resume_from_checkpoint=Path(folder).exists())
    finally:
        logging.getLogger("stepmark").removeHandler(warnings)
    return trainer.seen, checksum(trainer), warnings.found


@pytest.mark.parametrize("name", list(CASES)[:3])
def test_a_resumed_run_draws_what_was_left(tmp_path: Path, name: str) -> None:
    """In the first epoch and in the second."""
    whole, weights, _ = train(str(tmp_path / "whole"), name)
    assert len(whole) == STEPS
    for stop, saved in ((4, 3), (8, 6)):
        assert train(str(tmp_path / str(stop)), name, stop)[0] == whole[:stop]
        assert train(str(tmp_path / str(stop)), name)[:2] == (whole[saved:], weights)


def test_what_cannot_be_restored_is_told(tmp_path: Path, ranks: Ranks) -> None:
    name = "a loader with a state and workers"
    assert not train(str(tmp_path / "1"), name, 4)[2]
    (told,) = train(str(tmp_path / "1"), name)[2]
    assert "Restores: its state has no random numbers of its workers" in told
    first, _ = ranks.run(train, str(tmp_path / "2"), "ranks count differently", nproc=2).check()
    assert [each.partition(",")[0] for each in first[2]] == ["train_dataset.read: changed by training"]
    assert "differs between ranks" in first[2][0]
