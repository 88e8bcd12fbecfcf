"""Data of the shapes that a recipe's data has, without reading any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from stepmark.config.recipe import Recipe
from stepmark.data.loader.collate import PadTo
from stepmark.data.prepared_data import choose_block_size

FINGERPRINT = "stand-in"


@dataclass(frozen=True)
class StandInData:
    """In place of `Prepared`: what training and evaluation read. `validation` is None where nothing is evaluated."""

    train: StandInBlocks
    validation: StandInBlocks | None
    fingerprint: str = FINGERPRINT


class StandInBlocks(Dataset[dict[str, Tensor]]):
    """Blocks as those of `PackedBlocks`, or `Conversations`, padded or packed: every token is the same, and every label
    counts."""

    def __init__(self, samples: int, block_size: int, packed: bool = False, padded: bool = False) -> None:
        self.block_size = block_size
        self.packed = packed
        self._padded = padded
        self.fingerprint = FINGERPRINT
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.zeros(self.block_size, dtype=torch.int64)
        sample = {"input_ids": tokens, "labels": tokens.clone()}
        if self.packed:
            sees = torch.ones(1, self.block_size, self.block_size, dtype=torch.bool)
            sample |= {"position_ids": tokens.clone(), "attention_mask": sees}
        return sample

    def own_padding(self, *, fixed: bool) -> PadTo:
        """As that of what these stand for."""
        return PadTo(self.block_size if fixed and self._padded else None, side="right")


def stand_in_data(recipe: Recipe, tokenizer: Any, data_parallel_size: int, steps: int) -> StandInData:
    """Enough samples for `steps` steps of an epoch, the last of which lacks some, and two batches of an evaluation."""
    block_size = choose_block_size(recipe.data.block_size, tokenizer.model_max_length)
    training = recipe.training
    per_batch = training.per_device_train_batch_size * training.gradient_accumulation_steps * data_parallel_size
    ragged = 0 if training.dataloader_drop_last else (per_batch - 1) // 2
    kind = {
        "packed": recipe.data.packing,
        "padded": recipe.data.messages_column is not None and not recipe.data.packing,
    }
    train = StandInBlocks(per_batch * steps - ragged, block_size, **kind)
    validation = StandInBlocks(training.per_device_eval_batch_size * data_parallel_size + 1, block_size, **kind)
    return StandInData(train, validation if training.eval_strategy != "no" else None)
