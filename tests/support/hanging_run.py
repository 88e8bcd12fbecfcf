"""A training script that hangs in one place, on the last rank; started as one process, by `--nproc` or by torchrun.

Arguments: the place (HANGS), the folder, and `step_timeout`. STEPMARK_TEST_FLOOR shortens the seconds after which a
rank is named, STEPMARK_TEST_STEPS sets the steps of the run, and STEPMARK_TEST_RANK the rank that hangs.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info
from transformers import TrainerCallback

from stepmark import Trainer, TrainingArguments
from stepmark.errors import StepmarkError
from stepmark.liveness import progress
from tests.support.programs import Blocks, tiny_model

AT = 5  # the step
HANGS = (
    "callback",
    "collator",
    "worker",
    "skipped",
    "added",
    "evaluate",
    "train_end",
    "before_train",
    "optimizer",
    "stopped",
    "interpreter",
    "forward",
    "backward",
    "metrics",
)


def mine() -> bool:
    """Whether this is the rank that hangs."""
    last = int(os.environ.get("WORLD_SIZE", "1")) - 1
    return int(os.environ.get("RANK", "0")) == int(os.environ.get("STEPMARK_TEST_RANK", last))


def hang(place: str) -> None:
    """Stays here for ever."""
    note(place)
    while True:
        time.sleep(0.01)


def note(place: str) -> None:
    (FOLDER / "hangs").write_text(str(time.time()))


class Hangs(TrainerCallback):
    def __init__(self, place: str) -> None:
        self.place = place
        self.rate = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != AT:
            return
        if self.place == "callback" and mine():
            hang(self.place)
        if self.place == "stopped" and mine():
            note(self.place)
            signal.raise_signal(signal.SIGSTOP)
        if self.place == "interpreter" and mine():
            note(self.place)
            sum(range(10**12))  # one call of C code, which keeps the interpreter's lock
        if self.place == "skipped" and not mine():
            note(self.place)
            dist.all_reduce(torch.ones(3))
        if self.place == "added" and mine():
            note(self.place)
            dist.all_reduce(torch.ones(3))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.place == "evaluate" and mine():
            hang(self.place)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.place == "train_end" and mine():
            hang(self.place)


class Collator:
    """Blocks at its fifth batch, in the training process or in a worker."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.batches = 0

    def __call__(self, samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        self.batches += 1
        if self.place == "collator" and mine() and self.batches == AT:
            hang(self.place)
        if self.place == "worker" and mine() and self.batches == AT and get_worker_info() is not None:
            note(self.place)
            signal.raise_signal(signal.SIGSTOP)
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


class Slow(torch.optim.SGD):
    """Hangs in a step."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if PLACE == "optimizer" and mine() and self.steps == AT:
            hang(PLACE)
        return super().step(closure)


def compute_metrics(found: Any) -> dict[str, float]:
    if PLACE == "metrics" and mine():
        hang(PLACE)
    return {}


class Passes:
    """Hooks of the model, which hang in its fifth pass."""

    passes = 0

    def __call__(self, *unused: Any) -> None:
        self.passes += 1
        if mine() and self.passes == AT:
            hang(PLACE)


def train(place: str, folder: Path, step_timeout: str) -> None:
    model = tiny_model()
    if place == "forward":
        model.register_forward_pre_hook(Passes())
    if place == "backward":
        model.lm_head.weight.register_hook(Passes())
    args = TrainingArguments(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=2,
        max_steps=int(os.environ.get("STEPMARK_TEST_STEPS", "8")),
        device="cpu",
        logging_steps=1,
        save_strategy="no",
        eval_strategy="steps" if place in ("evaluate", "metrics") else "no",
        eval_steps=3,
        dataloader_num_workers=1 if place == "worker" else 0,
        step_timeout=step_timeout,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        args,
        data_collator=Collator(place),
        train_dataset=Blocks(64),
        eval_dataset=Blocks(4),
        compute_metrics=compute_metrics if place == "metrics" else None,
        callbacks=[Hangs(place)],
        optimizers=(Slow(model.parameters(), lr=0.1), None),
    )
    if place == "before_train" and mine():
        hang(place)
    trainer.train()


def main(place: str, folder: str, step_timeout: str) -> None:
    global PLACE, FOLDER
    PLACE, FOLDER = place, Path(folder)
    progress.FLOOR = float(os.environ.get("STEPMARK_TEST_FLOOR", progress.FLOOR))
    try:
        train(place, FOLDER, step_timeout)
    except StepmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


PLACE, FOLDER = "", Path()

if __name__ == "__main__":
    main(*sys.argv[1:])
