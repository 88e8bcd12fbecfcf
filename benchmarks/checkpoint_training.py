"""Training with saves beside training without: what saving in the background takes from the loop.

    .venv/bin/python benchmarks/checkpoint_training.py --threads 1
    .venv/bin/python benchmarks/checkpoint_training.py --threads 2

A GPT-2 of the small size (124 M parameters) with its AdamW states, 1.5 GB together, is trained on the CPU in a loop of
one rank that calls `Checkpointer.save` by itself. A save is made once five times the time has passed that saves take to
become durable, so that they take at most a fifth. Each round has one stretch with saves and one without, of so many
periods between two saves, in changing order; printed are medians, the median of the ratios of throughput within a
round, and the processor seconds that one save takes, in the loop (copying) and behind it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
from keeping import keep, machine  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel  # noqa: E402

from stepmark import Checkpointer  # noqa: E402

SHARE = 5  # a save takes at most one part in so many of the time


class Run:
    """A model in training, and how long its saves take."""

    def __init__(self, options: argparse.Namespace, folder: str) -> None:
        torch.manual_seed(0)
        self.model = GPT2LMHeadModel(GPT2Config())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.tokens = torch.randint(0, 50257, (options.batch, options.length))
        self.checkpointer = Checkpointer(folder, keep_last=1)
        self.step = 0
        self.durable: list[float] = []
        self.copying: list[float] = []
        self.behind: list[float] = []

    def train_step(self) -> None:
        self.model(input_ids=self.tokens, labels=self.tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def save(self) -> Any:
        return self.checkpointer.save(self.step, {"model": self.model, "optimizer": self.optimizer})

    def save_and_look(self) -> None:
        """A save with nothing beside it: how long it takes, and what it costs."""
        started, cpu = time.perf_counter(), time.process_time()
        handle = self.save()
        copied = time.process_time()
        handle.result()
        self.durable.append(time.perf_counter() - started)
        self.copying.append(copied - cpu)
        self.behind.append(time.process_time() - copied)

    def stretch(self, steps: int, every: int | None) -> tuple[float, list[float]]:
        """Steps per second, and the seconds that saves took to become durable; the last save is waited for."""
        handles, seconds = [], []
        started = time.perf_counter()
        for index in range(steps):
            self.train_step()
            if every is not None and index % every == every // 2:
                begun = time.perf_counter()
                handles.append((begun, self.save()))
            if handles and handles[-1][1].done():
                seconds.append(time.perf_counter() - handles.pop()[0])
        for begun, handle in handles:
            handle.result()
            seconds.append(time.perf_counter() - begun)
        return steps / (time.perf_counter() - started), seconds


def measure(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    run = Run(options, folder)
    for _ in range(2):
        run.train_step()
    run.save().result()
    for _ in range(3):
        run.save_and_look()
    alone, _ = run.stretch(3, None)
    every = max(1, round(SHARE * statistics.median(run.durable) * 1.5 * alone) + 1)  # it takes longer beside training
    steps = every * options.periods
    speeds: dict[str, list[float]] = {"without": [], "with saves": []}
    seconds: list[float] = []
    for index in range(options.rounds):
        for name in ("without", "with saves") if index % 2 else ("with saves", "without"):
            speed, took = run.stretch(steps, every if name == "with saves" else None)
            speeds[name].append(speed)
            seconds += took
        print(f"round {index}: " + "  ".join(f"{name} {each[-1]:.3f}" for name, each in speeds.items()), flush=True)
    run.checkpointer.close()
    return {
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "speeds": speeds,
        "every": every,
        "steps": steps,
        "durable alone": statistics.median(run.durable),
        "durable beside training": statistics.median(seconds),
        "copying cpu": statistics.median(run.copying),
        "background cpu": statistics.median(run.behind),
    }


def report(options: argparse.Namespace, found: dict[str, Any]) -> str:
    speeds = found["speeds"]
    pairs = zip(speeds["with saves"], speeds["without"], strict=True)
    ratio = statistics.median(one / other for one, other in pairs)
    period = found["every"] / statistics.median(speeds["with saves"])
    return "\n".join(
        [
            machine(),
            f"GPT-2 with {found['parameters'] / 1e6:.0f} M parameters and AdamW, batch {options.batch} x "
            f"{options.length} tokens, {options.threads} training threads, {options.rounds} rounds of {found['steps']} "
            f"steps, a save every {found['every']} steps ({period:.1f} s)",
            "",
            "| | steps/s |",
            "| --- | --- |",
            *(f"| {name} | {statistics.median(each):.3f} |" for name, each in speeds.items()),
            "",
            f"- {'holds' if ratio >= 0.97 else 'MISSED'}: throughput with saves beside without (at least 0.97): "
            f"{ratio:.3f}",
            f"- a save becomes durable in {found['durable alone']:.2f} s alone, and in "
            f"{found['durable beside training']:.2f} s beside training "
            f"({100 * found['durable beside training'] / period:.0f} % of the time between saves)",
            f"- processor seconds of a save: {found['copying cpu']:.2f} in the loop, {found['background cpu']:.2f} "
            "behind it",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="threads that train")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--periods", type=int, default=2, help="saves in a stretch")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--folder", default=None, help="where to save; must be on a disk (default: the temporary one)")
    parser.add_argument("--save", action="store_true", help="append the numbers to results/checkpoint_training.csv")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = measure(options, folder)
    table = report(options, found)
    print(f"\n{table}")
    if options.save:
        keep("checkpoint_training", f"{options.threads} threads", table)


if __name__ == "__main__":
    main()
