"""Runs in which something goes wrong on purpose, and a lazy one that compiles when it should not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from stepmark import Trainer, TrainingArguments
from stepmark.data.loader.collate import PadTo
from stepmark.filesystem.json_files import read_lines
from tests.support.programs import VOCABULARY, tiny_model


class TwoLengths(torch.utils.data.Dataset):
    """Short samples, and a few long ones."""

    def __init__(self, samples: int, long: list[int]) -> None:
        self.lengths = [12 if index in long else 6 for index in range(samples)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = [(index + i) % VOCABULARY for i in range(self.lengths[index])]
        return {"input_ids": tokens, "labels": tokens}


class ComputeAt(TrainerCallback):
    """A user's callback that computes something on the device after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        if state.global_step == self.step:
            known["model"].lm_head.weight.detach().abs().sum().item()


def compile_late(folder: str) -> list[dict[str, Any]]:
    """Ten steps of one sample each, one of them long, and a callback that computes at step 8; the logged events."""
    args = TrainingArguments(
        output_dir=folder,
        device="xla",
        max_steps=10,
        per_device_train_batch_size=1,
        logging_steps=2,
        save_strategy="steps",
        save_steps=3,
        disable_tqdm=True,
        seed=3,
    )
    dataset = TwoLengths(10, long=[])
    trainer = Trainer(tiny_model(), args, data_collator=PadTo([8, 16]), train_dataset=dataset, callbacks=[ComputeAt(8)])
    fifth = order_of(trainer)[4]  # the fifth step takes it
    dataset.lengths[fifth] = 12
    trainer.train()
    return read_lines(Path(folder) / "events.jsonl")


def order_of(trainer: Trainer) -> list[int]:
    """Which sample each step of the first epoch takes."""
    loader = trainer._loaders.train_batches(trainer.train_dataset).loader
    return [int(batch[0].inputs["input_ids"][0, 0]) for batch in loader]
