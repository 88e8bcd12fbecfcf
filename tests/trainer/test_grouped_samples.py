"""`train_sampling_strategy: group_by_length` in runs: exact after resuming, the same on several ranks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from stepmark import PadTo, Trainer, TrainingArguments
from stepmark.cli.supervised_run import SupervisedRun
from stepmark.errors import UsageError
from stepmark.launch.step_board import GROUPED, StepPlace
from tests.support.programs import LENGTH, checksum, tiny_model
from tests.support.ranks import Ranks

HERE = "tests.trainer.test_grouped_samples"


class Sentences(torch.utils.data.Dataset):
    """Samples of 2 to LENGTH tokens."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        sizes = torch.randint(2, LENGTH + 1, (41,), generator=generator).tolist()
        self.rows = [torch.randint(0, 60, (size,), generator=generator) for size in sizes]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def trainer(folder: str, dataset: Any = None, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {"max_steps": 14, "per_device_train_batch_size": 4, "learning_rate": 1e-3}
    defaults |= {"logging_steps": 1, "save_strategy": "no", "device": "cpu", "disable_tqdm": True}
    args = TrainingArguments(output_dir=folder, train_sampling_strategy="group_by_length", **defaults | options)
    samples: Any = Sentences() if dataset is None else dataset
    return Trainer(tiny_model(dropout=0.0), args, PadTo(), train_dataset=samples)


def shapes_of(made: Trainer) -> list[int]:
    """The length of each micro-batch of an epoch."""
    return [batch["input_ids"].shape[1] for batch in made.get_train_dataloader()]


def test_a_run_that_is_resumed_is_the_run_that_was_not_interrupted(tmp_path: Path) -> None:
    whole = trainer(str(tmp_path / "whole"), save_strategy="steps", save_steps=4)
    whole.train()
    for step in (4, 12):  # in the first epoch, of 11 steps, and in the second
        folder = tmp_path / str(step)
        shutil.copytree(tmp_path / "whole" / f"checkpoint-{step}", folder / f"checkpoint-{step}")
        resumed = trainer(str(folder))
        resumed.train(resume_from_checkpoint=True)
        assert checksum(resumed) == checksum(whole)


def test_lengths_are_grouped_by_a_column_that_the_model_does_not_take(tmp_path: Path) -> None:
    import datasets

    rows = [{"input_ids": [1] * (2 + index % 9), "labels": [1] * (2 + index % 9)} for index in range(40)]
    for row in rows:
        row["words"] = -len(row["input_ids"])  # type: ignore[assignment]
    table = datasets.Dataset.from_list(rows)
    options: dict[str, Any] = {"num_train_epochs": 1, "max_steps": -1, "per_device_train_batch_size": 2}
    by_column = shapes_of(trainer(str(tmp_path), table, length_column_name="words", **options))
    by_length = shapes_of(trainer(str(tmp_path), table, **options))
    for start in range(0, 20, 5):  # groups of five steps, whose first may hold the longest sample of all
        opposite, descending = by_column[start + 1 : start + 5], by_length[start + 1 : start + 5]
        assert opposite == sorted(opposite)
        assert descending == sorted(descending, reverse=True)
        assert len({*opposite}) > 1 < len({*descending})


def run(folder: str, batch: int) -> dict[str, Any]:
    made = trainer(folder, per_device_train_batch_size=batch)
    made.train()
    return {"weights": checksum(made), "losses": [log["loss"] for log in made.state.log_history if "loss" in log]}


def test_two_ranks_take_the_steps_of_one(ranks: Ranks, tmp_path: Path) -> None:
    (alone,) = ranks.run(f"{HERE}:run", str(tmp_path / "1"), 4).check()
    together = ranks.run(f"{HERE}:run", str(tmp_path / "2"), 2, nproc=2).check()
    assert together[0] == together[1]
    assert together[0]["losses"] == pytest.approx(alone["losses"], rel=1e-5)


def refusal(folder: str) -> str:
    with pytest.raises(UsageError) as raised:
        trainer(folder, Sentences(seed=int(os.environ["RANK"]))).train()
    return str(raised.value)


def test_samples_that_differ_among_ranks_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks.run(f"{HERE}:refusal", str(tmp_path), nproc=2).check():
        assert message.startswith("train_sampling_strategy: group_by_length needs samples of the same lengths on all")


class Lines(IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Any:
        return iter([{"input_ids": torch.ones(4, dtype=torch.long)}])


def test_a_stream_cannot_be_grouped(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="^train_sampling_strategy: an iterable dataset"):
        trainer(str(tmp_path), Lines()).train()


def test_the_samples_of_a_failed_step_are_told_by_their_place() -> None:
    state = {"dataset_size": 41, "samples": 12, "epoch": 1, "seed": 42, "order": "grouped-1 shuffled-1"}
    place = StepPlace.of(14, 4, state)
    assert place.shuffled == GROUPED
    assert SupervisedRun.describe(place) == "samples 9 to 12 of epoch 1, which is grouped by length"
