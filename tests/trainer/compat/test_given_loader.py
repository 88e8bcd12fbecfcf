"""Loaders of the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler, TensorDataset

from stepmark import Trainer, TrainingArguments
from stepmark.data.loader.labels import LabelRule
from stepmark.errors import UsageError
from stepmark.trainer.compat.given_loader import GivenLoader
from stepmark.training.model_labels import label_rule
from tests.support.models import build
from tests.support.programs import Blocks, tiny_model


def test_a_sampler_must_divide_the_data_among_the_data_parallel_ranks() -> None:
    """Ranks that share the model, as stages or shards, train on the same batches."""
    data, labels = TensorDataset(torch.arange(8)), label_rule(build("llama"))

    def loader(parts: int, part: int) -> DataLoader[tuple[torch.Tensor, ...]]:
        return DataLoader(data, sampler=DistributedSampler(data, parts, part))

    assert GivenLoader(loader(2, 1), rank=1, world_size=2, labels=labels).steps_per_epoch == 4
    for parts, part, rank, world_size in ((2, 1, 0, 1), (4, 1, 1, 2), (2, 1, 0, 2)):
        with pytest.raises(UsageError, match=f"num_replicas={world_size} and rank={rank}"):
            GivenLoader(loader(parts, part), rank=rank, world_size=world_size, labels=labels)


def test_a_loader_that_accelerate_has_prepared_is_not_divided_again() -> None:
    samples = [{"input_ids": torch.tensor([index])} for index in range(16)]

    def taken(rank: int) -> list[int]:
        batches = BatchSampler(SequentialSampler(samples), batch_size=2, drop_last=False)
        shard = BatchSamplerShard(batches, num_processes=2, process_index=rank)
        prepared = DataLoaderShard(samples, batch_sampler=shard)
        given = GivenLoader(prepared, rank=rank, world_size=2, labels=LabelRule())
        return [int(value) for step in given.ahead() for batch in step for value in batch.inputs["input_ids"]]

    assert sorted(taken(0) + taken(1)) == list(range(16))


def test_the_last_batches_are_left_out_where_they_are_too_few_for_all_ranks() -> None:
    loader = DataLoader([{"input_ids": value} for value in range(15)], batch_size=2, drop_last=True)  # seven batches

    def steps_of(rank: int, taken: int = 0, whole: bool = True) -> list[list[list[int]]]:
        given = GivenLoader(loader, rank=rank, world_size=2, accumulation=2, labels=LabelRule(), whole_turns=whole)
        given.load_state_dict({**given.state_dict(), "samples": taken, "ended": False})
        assert given.steps_per_epoch == 2
        return [[batch.inputs["input_ids"].tolist() for batch in step] for step in given.ahead()]

    assert steps_of(0) == [[[0, 1], [4, 5]], [[8, 9], [10, 11]]]
    assert steps_of(1) == [[[2, 3], [6, 7]], [[10, 11], [10, 11]]]
    assert steps_of(1, 4) == steps_of(1)[1:]
    assert steps_of(0, whole=False)[1] == [[8, 9], [12, 13]]


@pytest.mark.parametrize("which", ["get_train_dataloader", "get_eval_dataloader"])
def test_a_collator_of_the_trainer_s_loader_cannot_be_replaced(tmp_path: Path, which: str) -> None:
    """It would not be called."""
    arguments = TrainingArguments(str(tmp_path), device="cpu")
    made = getattr(Trainer(tiny_model(), arguments, train_dataset=Blocks(4), eval_dataset=Blocks(4)), which)()
    with pytest.raises(UsageError, match="^collate_fn: has no effect on the Trainer's loader; set data_collator"):
        made.collate_fn = list
