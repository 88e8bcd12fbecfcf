"""Datasets that can only be iterated."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, interleave_datasets
from datasets import IterableDataset as HuggingFaceStream
from datasets.distributed import split_dataset_by_node
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

from stepmark import Trainer, TrainingArguments
from stepmark.errors import CheckpointMismatch, UsageError
from tests.support.programs import Blocks, StopsAt, tiny_model
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


@pytest.mark.parametrize("sized", [False, True])
def test_a_run_says_how_long_an_epoch_is_where_that_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sized: bool
) -> None:
    run(tmp_path, Sized(8) if sized else Stream(8), max_steps=6)
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("data "))
    assert ("steps per epoch" in line) is sized, line


def test_an_evaluation_counts_every_sample_of_a_stream_once(tmp_path: Path) -> None:
    trainer = run(tmp_path, Stream(12))
    expected = trainer.evaluate(Blocks(7, seed=1))["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert len(trainer.predict(Stream(7)).predictions) == 7  # type: ignore[arg-type]


def test_a_resumed_run_takes_the_batches_that_were_left(tmp_path: Path) -> None:
    """In the second epoch, with its other order."""
    undisturbed = run(tmp_path / "a", Stream(6))
    run(tmp_path / "b", Stream(6), StopsAt(4))
    resumed = run(tmp_path / "b", Stream(6), resume_from_checkpoint=True)
    assert losses(resumed) == losses(undisturbed)
    assert len(losses(resumed)) == 6


class Seen(TrainerCallback):
    """The samples of each step, by what the collator has been given."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def __call__(self, samples: list[Any]) -> dict[str, torch.Tensor]:
        self.numbers += [int(sample["number"]) for sample in samples]
        return {
            name: torch.stack([torch.as_tensor(each[name]) for each in samples]) for name in ("input_ids", "labels")
        }


def numbered(kind: str, samples: int = 24) -> Any:
    """A stream of `datasets`, in three shards."""
    rows = Blocks(samples)
    columns = {name: [rows[index][name].tolist() for index in range(samples)] for name in ("input_ids", "labels")}
    found: Any = Dataset.from_dict({"number": list(range(samples)), **columns}).to_iterable_dataset(num_shards=3)
    if kind == "mapped":
        return found.filter(lambda row: row["number"] % 5 != 4).map(lambda row: {"twice": 2 * row["number"]})
    if kind == "batched":
        return found.map(lambda rows: {"twice": rows["number"]}, batched=True, batch_size=5)
    if kind == "shuffled":
        return found.shuffle(seed=3, buffer_size=8)
    if kind == "drawing":  # keeps two in three, by the global generator
        return found.filter(lambda row: random.random() < 0.67)
    if kind == "interleaved":
        return interleave_datasets([found, found.filter(lambda row: row["number"] % 2 == 0)], [0.5, 0.5], seed=1)
    return Numbers(samples) if kind == "torch" else found


class Numbers(IterableDataset[dict[str, Any]]):
    def __init__(self, samples: int) -> None:
        self.samples, self.read = Blocks(samples), 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in range(len(self.samples)):
            self.read += 1
            yield {**self.samples[index], "number": index}


KINDS = ["plain", "mapped", "batched", "shuffled", "drawing", "interleaved", "torch"]


def samples_of(folder: Path, data: Any, *callbacks: TrainerCallback, **options: Any) -> list[int]:
    torch.manual_seed(0)
    seen = Seen()
    args = TrainingArguments(str(folder), **{**FIELDS, "remove_unused_columns": False, **options})
    Trainer(tiny_model(), args, data_collator=seen, train_dataset=data, callbacks=list(callbacks)).train()
    return seen.numbers


class Reads(TrainerCallback):
    """Reads the same stream, in the middle of the run."""

    def on_step_end(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        next(iter(train_dataloader))


@pytest.mark.parametrize("kind", KINDS[2:])  # the others do less
def test_a_stream_resumed_with_another_batch_size_goes_on_where_it_was(tmp_path: Path, kind: str) -> None:
    """Every sample once, in the order of a run that nothing stopped, and on into the second epoch."""
    whole = samples_of(tmp_path / "whole", numbered(kind), per_device_train_batch_size=1, max_steps=40)
    folder, options, before, after = tmp_path / "cut", {"max_steps": 12, "save_steps": 2}, 3, 2
    first = samples_of(folder, numbered(kind), StopsAt(2), Reads(), per_device_train_batch_size=before, **options)
    data = numbered(kind)
    rest = samples_of(folder, data, resume_from_checkpoint=True, per_device_train_batch_size=after, **options)
    found = first[: 2 * before] + rest
    assert len(found) > (16 if kind == "drawing" else 24)
    assert found[:40] == whole[: len(found[:40])]


@pytest.mark.parametrize(("kind", "from_state"), [*((each, True) for each in KINDS[:3]), ("shuffled", False)])
def test_a_stream_goes_on_from_its_own_state_where_that_is_exact(
    tmp_path: Path, kind: str, from_state: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Any] = []
    original = HuggingFaceStream.load_state_dict
    monkeypatch.setattr(
        HuggingFaceStream, "load_state_dict", lambda self, state: (loaded.append(state), original(self, state))[1]
    )
    samples_of(tmp_path, numbered(kind), StopsAt(2))
    samples_of(tmp_path, numbered(kind), resume_from_checkpoint=True)
    assert len(loaded) == from_state


def unseeded(kind: str) -> Any:
    found = numbered("plain")
    return found.shuffle(buffer_size=8) if kind == "shuffled" else interleave_datasets([found, found], [0.5, 0.5])


@pytest.mark.parametrize("kind", ["shuffled", "interleaved"])
def test_a_stream_that_is_shuffled_without_a_seed_is_another_one(tmp_path: Path, kind: str) -> None:
    samples_of(tmp_path, unseeded(kind), StopsAt(2))
    with pytest.raises(CheckpointMismatch, match="a stream's shuffle or interleaving has another seed, or none"):
        samples_of(tmp_path, unseeded(kind), resume_from_checkpoint="true")


def train_unseeded(folder: str) -> None:
    samples_of(Path(folder), unseeded("shuffled"))


def test_ranks_that_would_shuffle_differently_are_refused(tmp_path: Path, ranks: Ranks) -> None:
    outcome = ranks.run(train_unseeded, str(tmp_path), nproc=2)
    assert all("train_dataset: is another one on some ranks" in log for log in outcome.logs)


def predict_unseeded(folder: str) -> int:
    args = TrainingArguments(folder, **FIELDS, remove_unused_columns=False)
    return len(Trainer(tiny_model(), args, data_collator=Seen()).predict(unseeded("shuffled").take(8)).predictions)


def test_ranks_do_not_evaluate_differently_shuffled_streams(tmp_path: Path, ranks: Ranks) -> None:
    assert predict_unseeded(str(tmp_path)) == 8
    outcome = ranks.run(predict_unseeded, str(tmp_path), nproc=2)
    assert all("a stream is shuffled without a seed" in log for log in outcome.logs)


def losses_of_a_rank(folder: str) -> list[float]:
    return losses(run(Path(folder), Stream(24)))


def split_losses(folder: str, kind: str, shards: int) -> list[Any]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    data: Any = numbered("plain", 24) if shards == 3 else numbered("plain", 24).reshard(shards)
    data = split_dataset_by_node(data, rank=rank, world_size=size)
    if kind == "taken":
        data = data.take(6)
    args = TrainingArguments(folder, **FIELDS)

    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(data.with_format("torch"), batch_size=2)

    made = (Own if kind == "loader" else Trainer)(tiny_model(dropout=0.0), args, train_dataset=data)
    try:
        made.train()
    except UsageError as error:
        return [str(error).partition(":")[0]]
    return losses(made)


@pytest.mark.parametrize("kind", ["plain", "loader", "taken"])
def test_of_a_split_stream_the_ranks_train_all_samples(tmp_path: Path, ranks: Ranks, kind: str) -> None:
    """Each once; where the split cannot be undone, it is named."""
    two = ranks.run("tests.trainer.test_streams:split_losses", str(tmp_path / "two"), kind, 3, nproc=2).check()
    if kind != "plain":
        assert two == [["split_dataset_by_node"]] * 2
        return
    one = losses(run(tmp_path / "one", numbered("plain", 24), per_device_train_batch_size=4))
    assert two[0] == pytest.approx(one, rel=1e-5)


class Sized(Stream):
    def __len__(self) -> int:
        return len(self.samples)


def test_a_stream_with_a_length_has_epochs(tmp_path: Path) -> None:
    trainer = run(tmp_path / "a", Sized(7), max_steps=-1, num_train_epochs=2)
    assert (trainer.state.global_step, trainer.state.epoch, trainer.state.num_train_epochs) == (8, 2.0, 2)
    dropped = run(tmp_path / "b", Sized(7), max_steps=-1, num_train_epochs=2, dataloader_drop_last=True)
    assert (dropped.state.global_step, dropped.state.epoch) == (6, 2.0)
    endless = run(tmp_path / "c", Stream(7))
    assert endless.state.num_train_epochs == sys.maxsize
    run(tmp_path / "d", Sized(7), StopsAt(2), max_steps=-1, num_train_epochs=2)
    options = {"max_steps": -1, "num_train_epochs": 2, "resume_from_checkpoint": True, "logging_steps": 1}
    resumed = run(tmp_path / "d", Sized(7), per_device_train_batch_size=3, **options)
    assert (resumed.state.global_step, resumed.state.epoch) == (6, 2.0)


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
