"""Programs for ranks: training on data that draw from the global generators of the training process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stepmark import Trainer, TrainingArguments
from tests.support.programs import VOCABULARY, Blocks, KillAt, checksum, logged, tiny_model

Sample = dict[str, torch.Tensor]


def drawn(sample: Sample) -> Sample:
    """The sample with three tokens, one drawn from each generator."""
    tokens = [int(VOCABULARY * draw) for draw in (torch.rand(()).item(), random.random(), np.random.rand())]
    ids = torch.cat([torch.tensor(tokens), sample["input_ids"][3:]])
    return {"input_ids": ids, "labels": ids}


class Augmented(Blocks):
    def __getitem__(self, index: int) -> Sample:
        return drawn(super().__getitem__(index))


class AugmentedStream(torch.utils.data.IterableDataset[Sample]):
    def __iter__(self) -> Iterator[Sample]:
        return map(drawn, (Blocks(24)[index] for index in range(24)))


class GivesLoader(Trainer):
    """Returns PyTorch's loader."""

    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.train_dataset, 2, shuffle=True)


def train_each(kind: str, *folders: str) -> list[dict[str, Any]]:
    return [train(kind, folder) for folder in folders]


def train(kind: str, folder: str, kill_at: int | None = None, **options: Any) -> dict[str, Any]:
    """`kind`: map, stream or loader."""
    args = TrainingArguments(
        output_dir=folder, max_steps=8, per_device_train_batch_size=2, logging_steps=1, save_strategy="steps",
        save_steps=1, disable_tqdm=True, device="cpu", resume_from_checkpoint=True, **options,
    )  # fmt: skip
    made = GivesLoader if kind == "loader" else Trainer
    data = AugmentedStream() if kind == "stream" else Augmented(24)
    callbacks = [] if kill_at is None else [KillAt(kill_at, None)]
    trainer = made(tiny_model(), args, train_dataset=data, callbacks=callbacks)
    trainer.train()
    return {**logged(Path(folder)), "weights": checksum(trainer)}
