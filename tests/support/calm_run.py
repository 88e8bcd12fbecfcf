"""A healthy training script with what keeps ranks waiting: evaluations, saves, slow data, and compilations on a lazy
device. Arguments: the folder, the steps, the device. STEPMARK_TEST_FLOOR is as in hanging_run.py.
"""

from __future__ import annotations

import os
import sys
import time

import torch

from stepmark import Trainer, TrainingArguments
from stepmark.liveness import progress
from tests.support.programs import Blocks, tiny_model


class Collator:
    """Every 400th batch takes two seconds."""

    batches = 0

    def __call__(self, samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        self.batches += 1
        if self.batches % 400 == 0:
            time.sleep(2)
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def main(folder: str, steps: str, device: str) -> None:
    progress.FLOOR = float(os.environ.get("STEPMARK_TEST_FLOOR", progress.FLOOR))
    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=2,
        max_steps=int(steps),
        device=device,
        logging_steps=100,
        save_steps=200,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=250,
        disable_tqdm=True,
    )
    Trainer(tiny_model(), args, data_collator=Collator(), train_dataset=Blocks(512), eval_dataset=Blocks(64)).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
