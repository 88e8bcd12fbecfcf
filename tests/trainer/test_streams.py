"""Datasets that can only be iterated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

from stepmark import Trainer, TrainingArguments
from stepmark.errors import UsageError
from tests.support.programs import Blocks, tiny_model
from tests.support.ranks import Ranks

FIELDS: dict[str, Any] = {
    "max_steps": 6,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 3,
    "logging_steps": 1,
    "save_steps": 2,
    "disable_tqdm": True,
    "device": "cpu",
}


class Stream(IterableDataset[dict[str, Any]]):
    """The samples of a dataset in their order, of the second half first in odd epochs, with a column for people."""

    def __init__(self, samples: int, seed: int = 0) -> None:
        self.samples = Blocks(samples, seed=seed)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        size = len(self.samples)
        for index in range(size):
            sample = self.samples[(index + self.epoch % 2 * size // 2) % size]
            yield {**sample, "source": f"file {index}"}


class Plain:
    """No class of PyTorch's."""

    def __init__(self, samples: int) -> None:
        self.stream = Stream(samples)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.stream)


def run(folder: Path, train: Any, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    torch.manual_seed(0)
    args = TrainingArguments(str(folder), **{**FIELDS, **options})
    made = Trainer(
        tiny_model(dropout=0.0), args, train_dataset=train, eval_dataset=Stream(7, seed=1), callbacks=list(callbacks)
    )
    made.train()
    return made


def losses(trainer: Trainer) -> list[float]:
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def test_a_stream_trains_as_the_same_samples_in_a_list_do(tmp_path: Path) -> None:
    found = run(tmp_path / "a", Stream(12))
    assert losses(run(tmp_path / "b", Plain(12))) == losses(found)

    class InOrder(Trainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(Blocks(12), batch_size=2)  # type: ignore[arg-type]

    torch.manual_seed(0)
    args = TrainingArguments(str(tmp_path / "c"), **FIELDS)
    listed = InOrder(tiny_model(dropout=0.0), args, train_dataset=Blocks(12))
    listed.train()
    assert losses(found) == losses(listed)
    assert len(losses(found)) == 6


def test_an_evaluation_counts_every_sample_of_a_stream_once(tmp_path: Path) -> None:
    trainer = run(tmp_path, Stream(12))
    expected = trainer.evaluate(Blocks(7, seed=1))["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert len(trainer.predict(Stream(7)).predictions) == 7  # type: ignore[arg-type]


class StopsAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


@pytest.mark.parametrize("stop", [2, 4])  # in the first epoch, and in the second with its other order
def test_a_resumed_run_takes_the_batches_that_were_left(tmp_path: Path, stop: int) -> None:
    undisturbed = run(tmp_path / "a", Stream(6))
    run(tmp_path / "b", Stream(6), StopsAfter(stop))
    resumed = run(tmp_path / "b", Stream(6), resume_from_checkpoint=True)
    assert losses(resumed) == losses(undisturbed)
    assert len(losses(resumed)) == 6


def losses_of_a_rank(folder: str) -> list[float]:
    return losses(run(Path(folder), Stream(24)))


def test_two_ranks_take_the_batches_in_turn(tmp_path: Path, ranks: Ranks) -> None:
    two = ranks.run("tests.trainer.test_streams:losses_of_a_rank", str(tmp_path / "two"), nproc=2).check()
    one = losses(run(tmp_path / "one", Stream(24), per_device_train_batch_size=4))
    assert two[0] == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "named"), [({"max_steps": -1}, "max_steps"), ({"dataloader_num_workers": 2}, "dataloader_num_workers")]
)
def test_what_a_stream_cannot_do_is_named(tmp_path: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=f"^{named}: .*set "):
        run(tmp_path, Stream(6), **options)


@pytest.mark.parametrize("which", ["train_dataset", "eval_dataset"])
def test_a_generator_is_refused_before_the_first_step(tmp_path: Path, which: str) -> None:
    """Its second epoch, the second evaluation and a resumed run would have no samples."""
    sets: dict[str, Any] = {"train_dataset": Stream(6), "eval_dataset": Stream(6), which: iter(Stream(6))}
    args = TrainingArguments(str(tmp_path), eval_strategy="steps", eval_steps=3, **FIELDS)
    trainer = Trainer(tiny_model(dropout=0.0), args, **sets)
    with pytest.raises(UsageError, match=f"^{which}: an iterator \\(generator\\) can be read only once"):
        trainer.train()
    assert trainer.state.global_step == 0
    if which == "eval_dataset":
        assert trainer.evaluate(iter(Stream(6)))["eval_loss"] > 0  # type: ignore[arg-type]
