"""Compares data parallel training steps with torch's own, with and without a sharded optimizer, on CPU ranks over gloo.

    .venv/bin/python benchmarks/data_parallel.py --nproc 2
    .venv/bin/python benchmarks/data_parallel.py --nproc 4 --accumulation 4 --dtype bfloat16 --save

--save writes the table in benchmarks/results/.

Contestants, all with fused AdamW and clipping of the global norm: Stepmark's TrainStep, which is what the Trainer
runs, in plain data parallel form and with ZeRO-1; torch's DistributedDataParallel, alone and with torch's
ZeroRedundancyOptimizer; FSDP2 with the parameters kept after the forward pass. torch's send gradients in the last
micro-batch only, too. In bfloat16 Stepmark keeps fp32 master weights and sums gradients in fp32, which the others do
not. Every rank holds all of them and runs them in turn, round after round; a round is timed from barrier to barrier.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import zero1  # first: it sets the environment
from keeping import machine
from zero1 import LEARNING_RATE, LENGTH, LOOPBACK, MAX_NORM, VOCABULARY

import torch  # isort: skip
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from stepmark import Mesh
from stepmark.data.batch import MicroBatch, StepBatch
from stepmark.launch.supervisor import supervise
from stepmark.training.loss import MicroBatchLoss
from stepmark.training.optimizer import build_optimizer
from stepmark.training.step import TrainStep

Step = Callable[[list[Tensor]], Any]


def make_model(options: argparse.Namespace) -> nn.Module:
    model = zero1.make_model({"n_layer": options.layers, "n_embd": options.width, "n_head": 8})
    return model.to(getattr(torch, options.dtype)).train()


def with_stepmark(options: argparse.Namespace, mesh: Mesh, zero_1: bool = False) -> Step:
    model = make_model(options)
    optimizer = build_optimizer(
        "adamw_torch_fused",
        list(model.named_parameters()),
        mesh.runtime,
        learning_rate=LEARNING_RATE,
        sharded_over=mesh if zero_1 else None,
    )
    step = TrainStep(
        model, optimizer, MicroBatchLoss(model), mesh, accumulation=options.accumulation, max_grad_norm=MAX_NORM
    )

    def run(batches: list[Tensor]) -> None:
        targets = LENGTH - 1
        made = [MicroBatch({"input_ids": tokens, "labels": tokens}, len(tokens), targets) for tokens in batches]
        step(0, StepBatch(made, len(batches), 0.0, {}))

    return run


def with_torch(options: argparse.Namespace, mesh: Mesh, kind: str) -> Step:
    model: Any = make_model(options)
    if kind == "FSDP2":
        for block in model.transformer.h:
            fully_shard(block, reshard_after_forward=False)
        fully_shard(model, reshard_after_forward=False)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer: torch.optim.Optimizer
    if kind == "zero":
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, fused=True, parameters_as_bucket_view=True
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def run(batches: list[Tensor]) -> None:
        for index, tokens in enumerate(batches):
            last = index == len(batches) - 1
            if kind == "FSDP2":
                model.set_requires_gradient_sync(last)
            with nullcontext() if last or kind == "FSDP2" else model.no_sync():
                (model(input_ids=tokens, labels=tokens).loss / len(batches)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return run


CONTESTANTS: dict[str, Callable[[argparse.Namespace, Mesh], Step]] = {
    "Stepmark": with_stepmark,
    "DDP": lambda options, mesh: with_torch(options, mesh, "DDP"),
    "Stepmark, zero_1": lambda options, mesh: with_stepmark(options, mesh, zero_1=True),
    "DDP, ZeroRedundancyOptimizer": lambda options, mesh: with_torch(options, mesh, "zero"),
    "FSDP2": lambda options, mesh: with_torch(options, mesh, "FSDP2"),
}


def rank_main(options: argparse.Namespace) -> None:
    mesh = Mesh.create(device="cpu")
    rank = mesh.context.world.rank
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randint(0, VOCABULARY, (1, LENGTH), generator=generator) for _ in range(options.accumulation)]
    runs = {name: make(options, mesh) for name, make in CONTESTANTS.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    sent: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(options.rounds + 1):  # the first warms up
        for name, run in runs.items():
            dist.barrier()
            begun, before = time.perf_counter(), int(LOOPBACK.read_text())
            for _ in range(options.steps):
                run(batches)
            dist.barrier()
            if turn:
                times[name].append((time.perf_counter() - begun) / options.steps)
                sent[name].append((int(LOOPBACK.read_text()) - before) / options.steps)
    if rank == 0:
        options.out.write_text(table(options, sum(p.numel() for p in make_model(options).parameters()), times, sent))


def table(
    options: argparse.Namespace, parameters: int, times: dict[str, list[float]], sent: dict[str, list[float]]
) -> str:
    lines = [
        f"# Data parallel steps on {options.nproc} CPU ranks",
        "",
        f"GPT-2 with {parameters / 1e6:.1f} M parameters in {options.dtype}, {options.accumulation} micro-batches of "
        f"{LENGTH} tokens, torch {torch.__version__}, gloo, {options.rounds} rounds of {options.steps} steps. Ratios "
        "are medians of those within a round: a contestant's time by Stepmark's.",
        "",
        machine(),
        "",
        "| | seconds per step | by Stepmark's | by that with zero_1 | MB sent per step |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, each in times.items():
        ratios = [
            statistics.median(a / b for a, b in zip(each, times[ours], strict=True))
            for ours in ("Stepmark", "Stepmark, zero_1")
        ]
        megabytes = statistics.median(sent[name]) / 1e6
        shown = f"{statistics.median(each):.3f} | {ratios[0]:.2f} | {ratios[1]:.2f} | {megabytes:.1f}"
        lines.append(f"| {name} | {shown} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)  # where rank 0 writes the table
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(options)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "table.md"
        code = supervise([sys.executable, *sys.argv, "--out", str(out)], options.nproc)
        if code == 0:
            print(out.read_text(), end="")
            if options.save:
                name = f"data_parallel_{options.nproc}_{options.dtype}_{options.accumulation}.md"
                (Path(__file__).parent / "results" / name).write_text(out.read_text())
    return code


if __name__ == "__main__":
    sys.exit(main())
