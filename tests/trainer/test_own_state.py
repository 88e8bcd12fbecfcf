"""Datasets, samplers, collators and loaders of users that keep something between calls: a generator, a count."""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset as HubDataset
from torch.utils.data import BatchSampler, ConcatDataset, Dataset, IterableDataset, Sampler

from stepmark import Trainer, TrainingArguments
from tests.support.programs import VOCABULARY, StopsAt, checksum, tiny_model
from tests.support.ranks import Ranks

SAMPLES, LENGTH, STEPS = 10, 4, 12  # five steps an epoch on one rank
GENERATORS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(1),
    "numpy": lambda: np.random.default_rng(1),
    "legacy": lambda: np.random.RandomState(1),
    "python": lambda: random.Random(1),
}


def token(generator: Any) -> int:
    if isinstance(generator, torch.Generator):
        return int(torch.randint(VOCABULARY, (), generator=generator))
    return int(generator.random() * VOCABULARY)


def sample(index: int, drawn: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.tensor([index, drawn % VOCABULARY, 1, 2])
    return {"input_ids": ids, "labels": ids}


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return sample(index)


class Drawing(Rows):
    def __init__(self, kind: str) -> None:
        self.own = GENERATORS[kind]()

    def __getitem__(self, index: int) -> Any:
        return sample(index, token(self.own))


outside = np.random.default_rng(1)


class Outside(Rows):
    """Draws from a generator of the module, which is made anew with it."""

    def __init__(self) -> None:
        global outside
        outside = np.random.default_rng(1)

    def __getitem__(self, index: int) -> Any:
        return sample(index, token(outside))


class Transforms(Rows):
    """Has an object, or a function, that draws."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __getitem__(self, index: int) -> Any:
        return sample(index, self.transform(index))


def drawing(noise: Any) -> Callable[[int], int]:
    return lambda index: noise(index) + 1


class Noise:
    def __init__(self) -> None:
        self.own = np.random.default_rng(1)

    def __call__(self, _: int) -> int:
        return token(self.own)


class Late(Rows):
    own: Any = None

    def __getitem__(self, index: int) -> Any:
        self.own = self.own or GENERATORS["python"]()
        return sample(index, token(self.own) if index % 3 else 0)


class Counting(Rows):
    read = 0

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return sample(index, self.read)


class CountsByRank(Rows):
    read = 0

    def __getitem__(self, index: int) -> Any:
        self.read += 1 + int(os.environ.get("RANK", "0"))
        return sample(index)


class Globally(Rows):
    def __getitem__(self, index: int) -> Any:
        return sample(index, random.randrange(VOCABULARY) + int(torch.randint(VOCABULARY, ())))


class GoesOn(IterableDataset[Any]):
    """Begins an epoch where the one before has ended."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        for _ in range(SAMPLES):
            self.place += 1
            yield sample(self.place - 1)


class Shuffling(IterableDataset[Any]):
    def __init__(self) -> None:
        self.own = random.Random(1)

    def __iter__(self) -> Iterator[Any]:
        return map(sample, self.own.sample(range(SAMPLES), SAMPLES))


class Seeks(Shuffling):
    """Has a state, but for its generator."""

    def __init__(self) -> None:
        super().__init__()
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        start, self.place = self.place, 0
        for index in range(start, SAMPLES):
            self.place = index + 1
            yield sample(index, self.own.randrange(VOCABULARY))
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Order(Sampler[int]):
    """Another order in every epoch, by a count of its own or a generator."""

    def __init__(self, own: Any = None) -> None:
        self.epoch, self.own = 0, own

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter((self.own or np.random.RandomState(self.epoch)).permutation(SAMPLES).tolist())


class Wrapper:
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)


class Listed(Sampler[int]):
    """Another order in every epoch: that of the last one, turned by three."""

    def __init__(self) -> None:
        self.order = list(range(SAMPLES))

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.order = self.order[3:] + self.order[:3]
        return iter(self.order)


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


def rows_by_rank() -> Any:
    columns = {"input_ids": torch.arange(SAMPLES * LENGTH).view(SAMPLES, LENGTH).tolist()}
    columns["labels"] = columns["input_ids"]
    return HubDataset.from_dict(columns).with_format("torch").shuffle(seed=int(os.environ.get("RANK", "0")))


def stack(rows: list[Any]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


class Masks:
    """A collator with a generator of its own, maybe made in the first call."""

    def __init__(self, kind: str, late: bool = False) -> None:
        self.make, self.own = GENERATORS[kind], None if late else GENERATORS[kind]()

    def __call__(self, rows: list[Any]) -> dict[str, torch.Tensor]:
        self.own = self.own or self.make()
        return masked(self.own, rows)


def masked(own: Any, rows: list[Any]) -> dict[str, torch.Tensor]:
    batch = stack(rows)
    batch["input_ids"][:, 2] = torch.tensor([token(own) for _ in rows])
    return batch


class Leaves:
    """Keeps the last row for the next batch."""

    def __init__(self) -> None:
        self.left: list[Any] = []

    def __call__(self, rows: list[Any]) -> dict[str, torch.Tensor]:
        *given, last = [*self.left, *rows]
        self.left = [last]
        return stack(given)


def globally(rows: list[Any]) -> dict[str, torch.Tensor]:
    return masked(random, rows)


def in_a_comprehension(rows: list[Any]) -> dict[str, torch.Tensor]:
    batch = stack(rows)
    batch["input_ids"][:, 2] = torch.tensor([token(outside) for _ in rows])
    return batch


def of_the_hub(draw: Callable[[int], int]) -> Any:
    columns = {"input_ids": torch.arange(SAMPLES * LENGTH).view(SAMPLES, LENGTH).tolist()}
    data = HubDataset.from_dict({**columns, "labels": columns["input_ids"]}).to_iterable_dataset(num_shards=2)
    return data.map(lambda row: {name: torch.tensor([*each[:3], draw(0)]) for name, each in row.items()})


def unset() -> Any:
    def collate(rows: list[Any]) -> Any:
        return stack(rows) if rows else later

    if not SAMPLES:
        later = None
    return collate


def closure() -> Any:
    own = np.random.default_rng(1)
    return lambda rows: masked(own, rows)


loader = partial(torch.utils.data.DataLoader, batch_size=2, collate_fn=stack)
persistent = partial(loader, shuffle=True, num_workers=1, persistent_workers=True)
# By name: the dataset, the collator, and the loader.
CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any] | None, Callable[[Any], Any] | None]] = {
    **{f"dataset draws: {kind}": (partial(Drawing, kind), None, None) for kind in GENERATORS},
    **{f"collator draws: {kind}": (Rows, partial(Masks, kind), None) for kind in GENERATORS},
    "closure draws": (Rows, closure, None),
    "dataset made of several that draw": (lambda: ConcatDataset([Drawing("numpy"), Drawing("torch")]), None, None),
    "generator made in reading": (Late, None, None),
    "dataset draws outside": (Outside, None, None),
    "dataset has an object that draws": (lambda: Transforms(Noise()), None, None),
    "dataset has a function that draws": (lambda: Transforms(drawing(Noise())), None, None),
    "collator draws outside, in a comprehension": (Outside, lambda: in_a_comprehension, None),
    "stream of the hub draws": (lambda: of_the_hub(Noise()), None, None),
    "stream of the hub draws in a closure": (lambda: of_the_hub(drawing(Noise())), None, None),
    "sampler keeps a list": (Rows, None, lambda data: loader(data, sampler=Listed())),
    "collator with a name that is not set": (Rows, unset, None),
    "dataset counts": (Counting, None, None),
    "stream goes on": (GoesOn, None, None),
    "stream shuffles": (Shuffling, None, None),
    "stream seeks": (Seeks, None, None),
    "stream's collator draws": (GoesOn, lambda: globally, None),
    "stream's collator draws of its own": (Seeks, partial(Masks, "torch"), None),
    "loader of a stream that goes on": (GoesOn, None, loader),
    "loader of data that count": (Counting, None, loader),
    "loader of data that draw": (partial(Drawing, "numpy"), None, loader),
    "loader whose collator draws": (Rows, None, lambda data: loader(data, collate_fn=Masks("numpy", late=True))),
    "loader with persistent workers": (Globally, None, persistent),
    "loader with a state": (Globally, None, Restores),
    "loader with a state, of data that draw": (partial(Drawing, "torch"), None, Restores),
    "loader with a state and workers": (Rows, None, partial(Restores, num_workers=1)),
    "ranks count differently": (CountsByRank, None, None),
    "ranks have other rows": (rows_by_rank, None, None),
    "collator keeps a list": (Rows, Leaves, None),
    "sampler counts": (Rows, None, lambda data: loader(data, sampler=Order())),
    "sampler draws": (Rows, None, lambda data: loader(data, sampler=Order(np.random.RandomState(1)))),
    "batch sampler draws": (
        Rows,
        None,
        lambda data: torch.utils.data.DataLoader(
            data, batch_sampler=BatchSampler(Order(np.random.default_rng(1)), 2, False), collate_fn=stack
        ),
    ),
    "wrapped loader": (Rows, None, lambda data: Wrapper(loader(data, shuffle=True, generator=GENERATORS["torch"]()))),
}

TOLD = (
    *("loader with a state and workers", "ranks count differently", "collator keeps a list", "ranks have other rows"),
    "sampler keeps a list",
)


class Sees(Trainer):
    make: Callable[[Any], Any] | None = None

    def get_train_dataloader(self) -> Any:
        return super().get_train_dataloader() if self.make is None else self.make(self.train_dataset)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return super().get_eval_dataloader(eval_dataset) if self.make is None else self.make(self.eval_dataset)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        self.seen.append(inputs["input_ids"].tolist())
        return super().training_step(model, inputs, num_items_in_batch)


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def train(
    folder: str, name: str, stop: int | None = None, options: dict[str, Any] | None = None, *, shared: bool = True
) -> tuple[list[Any], str, list[str]]:
    """What each step was trained on, the checksum of the weights, and the warnings. `shared`: evaluations read the
    object that is trained on."""
    data, collator, make = CASES[name]
    args = TrainingArguments(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        save_steps=3,
        disable_tqdm=True,
        device="cpu",
        **(options or {}),
    )
    given = stack if collator is None else collator()
    rows = data()
    trainer = Sees(tiny_model(0.0), args, given, rows, rows if shared else data(), callbacks=[StopsAt(stop)])
    trainer.make, trainer.seen, warnings = make, [], Warnings()
    logging.getLogger("stepmark").addHandler(warnings)
    try:
        trainer.train(resume_from_checkpoint=Path(folder).exists())
    finally:
        logging.getLogger("stepmark").removeHandler(warnings)
    return trainer.seen, checksum(trainer), warnings.found


@pytest.mark.parametrize("name", [each for each in CASES if each not in TOLD])
def test_a_resumed_run_trains_what_was_left(tmp_path: Path, name: str) -> None:
    """In the first epoch and in the second."""
    whole, weights, _ = train(str(tmp_path / "whole"), name, None)
    assert len(whole) == STEPS
    for stop, saved in ((4, 3), (8, 6)):
        assert train(str(tmp_path / str(stop)), name, stop)[0] == whole[:stop]
        assert train(str(tmp_path / str(stop)), name)[:2] == (whole[saved:], weights)


def test_what_cannot_be_restored_is_told(tmp_path: Path, ranks: Ranks) -> None:
    name = "loader with a state and workers"
    assert not train(str(tmp_path / "1"), name, 4)[2]
    (told,) = train(str(tmp_path / "1"), name)[2]
    assert "Restores: its state has no random numbers of its workers" in told
    first, _ = ranks.run(train, str(tmp_path / "2"), "ranks count differently", nproc=2).check()
    assert [each.partition(",")[0] for each in first[2]] == ["train_dataset.read: changed by training"]
    assert "differs between ranks" in first[2][0]
    (kept,) = train(str(tmp_path / "3"), "collator keeps a list")[2]
    assert kept.startswith("data_collator.left: changed by training, and in no checkpoint")
    (kept,) = train(str(tmp_path / "4"), "sampler keeps a list")[2]
    assert kept.startswith("Listed.order: changed by training, and in no checkpoint")


@pytest.mark.parametrize(
    "name", ["stream goes on", "stream shuffles", "dataset draws: torch", "loader of data that draw"]
)
def test_an_evaluation_leaves_what_is_trained_on_as_it_was(tmp_path: Path, name: str) -> None:
    """Also if both read the same objects; and it has the same loss, however many came before it."""
    alone = train(str(tmp_path / "alone"), name)
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.0}
    assert train(str(tmp_path / "beside"), name, None, {"eval_strategy": "steps", "eval_steps": 2})[:2] == alone[:2]
    train(str(tmp_path / "same"), name, None, options, shared=False)
    lines = map(json.loads, (tmp_path / "same" / "metrics.jsonl").read_text().splitlines())
    assert len({line["eval_loss"] for line in lines if "eval_loss" in line}) == 1


def test_ranks_that_have_other_rows_are_refused(tmp_path: Path, ranks: Ranks) -> None:
    outcome = ranks.run(train, str(tmp_path / "1"), "ranks have other rows", nproc=2)
    assert all(outcome.codes)
    assert all("train_dataset: is another one on some ranks" in log for log in outcome.logs)


def test_other_seeds_of_a_generator_draw_other_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "collator draws: numpy"
    first = train(str(tmp_path / "1"), name, None)[0]
    monkeypatch.setitem(GENERATORS, "numpy", lambda: np.random.default_rng(2))
    second = train(str(tmp_path / "2"), name, None)[0]
    assert first != second
    assert [[row[0] for row in step] for step in first] == [[row[0] for row in step] for step in second]


@pytest.mark.parametrize("name", ["collator draws: torch", "dataset draws: python"])
def test_generators_are_the_same_for_processes_that_host_ranks_and_for_workers(
    tmp_path: Path, ranks: Ranks, name: str
) -> None:
    (hosted,) = ranks.run(train, str(tmp_path / "1"), name, None, {"data_parallel_replicas": 2}).check()
    two = ranks.run(train, str(tmp_path / "2"), name, None, {"dataloader_num_workers": 1}, nproc=2).check()
    assert sorted(hosted[0]) == sorted(two[0][0] + two[1][0])


class Shuffles(Trainer):
    """Whose loader and loss have a generator each."""

    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.train_dataset, 2, shuffle=True, generator=self.order)

    def factor(self) -> float:
        return 1 + 0.1 * float(self.noise.uniform())

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, **options)
        self.seen += inputs["input_ids"][:, 0].tolist()
        return (loss * self.factor(), outputs) if return_outputs else loss * self.factor()


def test_a_generator_of_the_loader_that_the_trainer_keeps_goes_on_and_that_of_the_loss_too(tmp_path: Path) -> None:
    def run(folder: str, stop: int | None, resume: bool) -> tuple[list[int], str]:
        sample = [index % VOCABULARY for index in range(8)]
        data = [{"input_ids": sample[index:] + sample[:index], "labels": sample} for index in range(8)]
        arguments = TrainingArguments(
            str(tmp_path / folder), device="cpu", num_train_epochs=3, per_device_train_batch_size=2, save_steps=5
        )
        rows = [{name: torch.tensor(each) for name, each in row.items()} for row in data]
        trainer: Any = Shuffles(tiny_model(), arguments, train_dataset=rows, callbacks=[StopsAt(stop)])  # type: ignore[arg-type]
        trainer.order, trainer.noise = torch.Generator().manual_seed(3), np.random.default_rng(4)
        trainer.seen = []
        trainer.train(resume_from_checkpoint=resume)
        return trainer.seen, checksum(trainer)

    seen, weights = run("whole", None, False)
    run("cut", 6, False)
    rest, same = run("cut", None, True)
    assert (rest, same) == (seen[10:], weights)
    again = torch.utils.data.DataLoader(range(8), 2, shuffle=True, generator=torch.Generator().manual_seed(3))
    assert seen[:8] == [int(each) for batch in again for each in batch]
