"""Stepmark under Ray Train: two workers, restarted by Ray when one is lost. Needs `pip install "ray[train]"`.

    python examples/ray/train.py /shared/runs/ray

Run again, it continues. `touch /shared/runs/ray/save-now` asks for a checkpoint, since signals do not reach the threads
in which Ray trains.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

from stepmark import Trainer, TrainingArguments

STEPS, LOOK_EVERY = 30, 5


class SaveWhenAsked(TrainerCallback):
    """Saves after a step if the file is there. Rank 0 looks, so that all ranks decide alike."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % LOOK_EVERY:
            return
        asked = [state.is_world_process_zero and self.file.exists()]
        torch.distributed.broadcast_object_list(asked)
        if asked[0]:
            control.should_save = True
            if state.is_world_process_zero:
                self.file.unlink()


def train(config: dict[str, str]) -> None:
    """What each worker runs."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2))
    rows = [{"input_ids": (row := (torch.arange(32) * (i % 7 + 1)) % 64), "labels": row} for i in range(256)]
    args = TrainingArguments(
        output_dir=config["output_dir"],
        max_steps=STEPS,
        save_steps=10,
        logging_steps=1,
        per_device_train_batch_size=4,
        disable_tqdm=True,
    )
    saver = SaveWhenAsked(Path(config["output_dir"]) / "save-now")
    trainer = Trainer(model, args, train_dataset=rows, callbacks=[saver])
    trainer.train(resume_from_checkpoint=True, save_model=True)


def main(output_dir: str) -> None:
    run = RunConfig(failure_config=FailureConfig(max_failures=3))
    folder = str(Path(output_dir).absolute())
    scaling = ScalingConfig(num_workers=2)
    TorchTrainer(train, train_loop_config={"output_dir": folder}, scaling_config=scaling, run_config=run).fit()


if __name__ == "__main__":
    main(sys.argv[1])
