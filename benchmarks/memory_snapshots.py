"""What a snapshot of `memory_every` costs the steps after it.

    .venv/bin/python benchmarks/memory_snapshots.py --threads 1 --length 256

A GPT-2 of the small size (124 M parameters, 1.5 GB with its AdamW states) is trained on the CPU by the Trainer, by one
rank, without checkpoints before the end. Snapshots are twice as far apart as `--every` steps: half of the steps follow
one, in the others none is copied. Runs with and without snapshots differ by more than a snapshot costs, halves of one
run do not. Printed is the median time of a step for each place between two snapshots, and the sums of both halves. It
needs 7 GB of memory, 3 of them in /dev/shm.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
from keeping import keep, machine  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback  # noqa: E402

from stepmark import Trainer, TrainingArguments  # noqa: E402

GOAL = 0.99


class Tokens(torch.utils.data.Dataset):
    def __init__(self, samples: int, length: int) -> None:
        self.tokens = torch.randint(0, 50257, (samples, length))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Clock(TrainerCallback):
    """When each step began."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.times.append(time.perf_counter())


def train(options: argparse.Namespace, folder: str) -> tuple[list[float], float]:
    """Median seconds of a step and of what follows it: that with a snapshot first, then those after it. And the seconds
    for which training waited for a snapshot."""
    period = 2 * options.every
    steps, clock = (options.periods + 1) * period, Clock()
    torch.manual_seed(0)
    trainer = Trainer(
        GPT2LMHeadModel(GPT2Config()),
        TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=options.batch,
            logging_steps=period,
            save_steps=10 * steps,
            memory_every=period,
            device="cpu",
            disable_tqdm=True,
        ),
        train_dataset=Tokens(steps * options.batch, options.length),
        callbacks=[clock],
    )
    trainer.train()
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    waited = [line["seconds_save"] for line in lines if "loss" in line and "seconds_save" in line]
    seconds = [after - before for before, after in itertools.pairwise(clock.times)]  # of steps 1, 2, ...
    places = [statistics.median(seconds[period + place - 1 :: period]) for place in range(period)]
    return places, statistics.median(waited)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="threads that train")
    parser.add_argument("--periods", type=int, default=9, help="between two snapshots")
    parser.add_argument("--every", type=int, default=10, help="steps over which the cost of a snapshot is spread")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--save", action="store_true", help="append the numbers to results/memory_snapshots.csv")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        places, waited = train(options, folder)
    after, later = sum(places[: options.every]), sum(places[options.every :])
    table = "\n".join(
        [
            machine(),
            f"GPT-2 with 124 M parameters and AdamW, batch {options.batch} x {options.length} tokens, "
            f"{options.threads} training threads, {options.periods} periods of {2 * options.every} steps",
            "",
            "| step after a snapshot | seconds, median |",
            "| --- | --- |",
            *(f"| {place or 'the snapshot itself'} | {seconds:.3f} |" for place, seconds in enumerate(places)),
            f"| {options.every} with the snapshot | {after:.3f} |",
            f"| {options.every} others | {later:.3f} |",
            "",
            f"- {'holds' if later / after >= GOAL else 'MISSED'}: throughput with a snapshot in {options.every} steps "
            f"beside without (at least {GOAL}): {later / after:.3f}",
            f"- training waited for a snapshot: {waited:.3f} s",
        ]
    )
    print(f"\n{table}")
    if options.save:
        keep("memory_snapshots", f"{options.threads} threads, every {options.every}", table)


if __name__ == "__main__":
    main()
