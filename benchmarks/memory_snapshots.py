"""Training with `memory_every` beside training without it.

    .venv/bin/python benchmarks/memory_snapshots.py --threads 1

A GPT-2 of the small size (124 M parameters, 1.5 GB with its AdamW states) is trained on the CPU by the Trainer, in runs
of one rank, without checkpoints before the end. Each round has one run with snapshots and one without, in changing
order. The first steps of a run are left out. Printed are medians, the median of the ratios of throughput within a
round, and the seconds in which training waited for snapshots. It needs 7 GB of memory, 3 of them in /dev/shm.
"""

from __future__ import annotations

import argparse
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


def train(options: argparse.Namespace, every: int | None, folder: str) -> tuple[float, float]:
    """Steps per second, over two periods of `memory_every`, and the seconds of a period that training waited."""
    steps, clock = 3 * options.every + 1, Clock()
    torch.manual_seed(0)
    trainer = Trainer(
        GPT2LMHeadModel(GPT2Config()),
        TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=options.batch,
            logging_steps=options.every,
            save_steps=10 * steps,
            memory_every=every,
            device="cpu",
            disable_tqdm=True,
        ),
        train_dataset=Tokens(steps * options.batch, options.length),
        callbacks=[clock],
    )
    trainer.train()
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    waited = [line["seconds_save"] for line in lines if "loss" in line and "seconds_save" in line]
    # From the beginning of a step behind the first period to that of one as many behind: with two snapshots.
    return 2 * options.every / (clock.times[3 * options.every] - clock.times[options.every]), statistics.median(waited)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="threads that train")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--every", type=int, default=10, help="memory_every")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--save", action="store_true", help="append the numbers to results/memory_snapshots.csv")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    speeds: dict[str, list[float]] = {"without": [], "with snapshots": []}
    waits: list[float] = []
    for index in range(options.rounds):
        for name in ("without", "with snapshots") if index % 2 else ("with snapshots", "without"):
            with tempfile.TemporaryDirectory() as folder:
                speed, waited = train(options, options.every if name == "with snapshots" else None, folder)
            speeds[name].append(speed)
            waits += [waited] if name == "with snapshots" else []
        print(f"round {index}: " + "  ".join(f"{name} {each[-1]:.3f}" for name, each in speeds.items()), flush=True)
    ratio = statistics.median(
        one / other for one, other in zip(speeds["with snapshots"], speeds["without"], strict=True)
    )
    table = "\n".join(
        [
            machine(),
            f"GPT-2 with 124 M parameters and AdamW, batch {options.batch} x {options.length} tokens, "
            f"{options.threads} training threads, {options.rounds} rounds, memory_every {options.every}",
            "",
            "| | steps/s |",
            "| --- | --- |",
            *(f"| {name} | {statistics.median(each):.3f} |" for name, each in speeds.items()),
            "",
            f"- {'holds' if ratio >= GOAL else 'MISSED'}: throughput with snapshots beside without (at least {GOAL}): "
            f"{ratio:.3f}",
            f"- training waited for a snapshot: {statistics.median(waits):.3f} s",
        ]
    )
    print(f"\n{table}")
    if options.save:
        keep("memory_snapshots", f"{options.threads} threads, every {options.every}", table)


if __name__ == "__main__":
    main()
