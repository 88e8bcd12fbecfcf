"""Compares data parallel training steps with torch's own, with and without a sharded optimizer, on CPU ranks over gloo.

    .venv/bin/python benchmarks/data_parallel.py --nproc 2
    .venv/bin/python benchmarks/data_parallel.py --nproc 4 --accumulation 4 --dtype bfloat16 --save
    .venv/bin/python benchmarks/data_parallel.py --gigabits 1

--save appends the numbers to benchmarks/results/data_parallel.csv. --gigabits puts the ranks on two hosts, namespaces
of this machine, with that network between them (bits per second in each direction), which needs root.

Contestants, all with fused AdamW and clipping of the global norm: Stepmark's TrainStep, which is what the Trainer
runs, in plain data parallel form, with ZeRO-1 and with fsdp; torch's DistributedDataParallel, alone and with torch's
ZeroRedundancyOptimizer; FSDP2 by hand. Both FSDP2 keep parameters after the forward pass. All but Stepmark's fsdp send
gradients in the last micro-batch only. In bfloat16 Stepmark keeps fp32 master weights and sums gradients in fp32, which
torch's do not; so two more that do are there then: DistributedDataParallel of fp32 parameters under autocast, and FSDP2
with a policy of mixed precision. Every rank holds all of them and runs them in turn, round after round, each time
beginning with another one; a round is timed from barrier to barrier, and at its end the new values that zero_1 leaves
on their way are waited for: with few --steps, that is at once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import zero1  # first: it sets the environment
from keeping import add_arguments, machine, on_ranks
from slow_network import bytes_sent, run_on_two_hosts, two_nodes
from zero1 import LEARNING_RATE, LENGTH, MAX_NORM, VOCABULARY

import torch  # isort: skip
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from stepmark import Mesh, parallelize
from stepmark.data.loader.batch import MicroBatch, StepBatch
from stepmark.training.optimizer import build_optimizer
from stepmark.training.step import TrainStep
from stepmark.training.weighted_loss import MicroBatchLoss

Step = Callable[[list[Tensor] | None], Any]  # None: the end of a round


def make_model(options: argparse.Namespace, dtype: str | None = None) -> nn.Module:
    model = zero1.make_model({"n_layer": options.layers, "n_embd": options.width, "n_head": 8})
    return model.to(getattr(torch, dtype or options.dtype)).train()


def with_stepmark(options: argparse.Namespace, mesh: Mesh, zero_1: bool = False, fsdp: str | None = None) -> Step:
    model = parallelize(make_model(options), mesh, fsdp=fsdp)
    optimizer = build_optimizer(
        "adamw_torch_fused",
        list(model.named_parameters()),
        mesh.runtime,
        learning_rate=LEARNING_RATE,
        sharded_over=mesh if zero_1 else None,
    )
    step = TrainStep(
        model,
        optimizer,
        MicroBatchLoss(model),
        mesh,
        accumulation=options.accumulation,
        max_grad_norm=MAX_NORM,
        reduce_dtype=getattr(torch, options.reduce_dtype),
    )

    step.defer_gathers()  # as the Trainer does

    def run(batches: list[Tensor] | None) -> None:
        if batches is None:
            optimizer.gathers.wait()
            return
        targets = options.rows * (LENGTH - 1)
        made = [MicroBatch({"input_ids": tokens, "labels": tokens}, len(tokens), targets) for tokens in batches]
        step(0, StepBatch(made, len(batches), 0.0, {}))

    return run


def with_torch(options: argparse.Namespace, kind: str, masters: bool = False) -> Step:
    """masters: parameters, their updates and the sums of gradients are in fp32, whatever computes."""
    model: Any = make_model(options, "float32" if masters else None)
    computing = getattr(torch, options.dtype)
    if kind == "FSDP2":
        policy = MixedPrecisionPolicy(param_dtype=computing, reduce_dtype=torch.float32)
        shared: dict[str, Any] = {"reshard_after_forward": False, **({"mp_policy": policy} if masters else {})}
        for block in model.transformer.h:
            fully_shard(block, **shared)
        fully_shard(model, **shared)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer: torch.optim.Optimizer
    if kind == "zero":
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, fused=True, parameters_as_bucket_view=True
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def run(batches: list[Tensor] | None) -> None:
        if batches is None:
            return
        for index, tokens in enumerate(batches):
            last = index == len(batches) - 1
            if kind == "FSDP2":
                model.set_requires_gradient_sync(last)
            with nullcontext() if last or kind == "FSDP2" else model.no_sync():
                with torch.autocast("cpu", computing, enabled=masters and kind != "FSDP2"):
                    loss = model(input_ids=tokens, labels=tokens).loss
                (loss / len(batches)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return run


CONTESTANTS: dict[str, Callable[[argparse.Namespace, Mesh], Step]] = {
    "Stepmark": with_stepmark,
    "DDP": lambda options, mesh: with_torch(options, "DDP"),
    "Stepmark, zero_1": lambda options, mesh: with_stepmark(options, mesh, zero_1=True),
    "DDP, ZeroRedundancyOptimizer": lambda options, mesh: with_torch(options, "zero"),
    "Stepmark, fsdp": lambda options, mesh: with_stepmark(options, mesh, fsdp="shard_grad_op"),
    "FSDP2": lambda options, mesh: with_torch(options, "FSDP2"),
}
IN_BFLOAT16: dict[str, Callable[[argparse.Namespace, Mesh], Step]] = {
    "DDP, autocast": lambda options, mesh: with_torch(options, "DDP", masters=True),
    "FSDP2, mixed precision": lambda options, mesh: with_torch(options, "FSDP2", masters=True),
}


def rank_main(options: argparse.Namespace) -> None:
    mesh = Mesh.create(device="cpu")
    rank = mesh.context.world.rank
    generator = torch.Generator().manual_seed(rank)
    shape = (options.rows, LENGTH)
    batches = [torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(options.accumulation)]
    left_out = options.without or []
    contestants = {**CONTESTANTS, **(IN_BFLOAT16 if options.dtype == "bfloat16" else {})}
    runs = {name: make(options, mesh) for name, make in contestants.items() if name not in left_out}
    interface = two_nodes.INTERFACE if options.gigabits else "lo"
    times: dict[str, list[float]] = {name: [] for name in runs}
    sent: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(options.rounds + 1):  # the first warms up
        for name in rotated(list(runs), turn):
            run = runs[name]
            dist.barrier()
            begun, before = time.perf_counter(), bytes_sent(interface)
            for _ in range(options.steps):
                run(batches)
            run(None)
            dist.barrier()
            if turn:
                times[name].append((time.perf_counter() - begun) / options.steps)
                sent[name].append((bytes_sent(interface) - before) / options.steps)
    hidden = {name: hidden_share(run, batches) for name, run in runs.items()}
    if rank == 0:
        parameters = sum(p.numel() for p in make_model(options).parameters())
        options.out.write_text(table(options, parameters, times, sent, hidden))


def rotated(names: list[str], turn: int) -> list[str]:
    """In another order every time: each leaves memory and caches in its own state for the next one."""
    first = turn % len(names)
    return names[first:] + names[:first]


def hidden_share(run: Step, batches: list[Tensor]) -> float:
    """Of the time in which this rank communicates, the share in which it computes too: from a trace of two steps."""
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
        run(batches)
        run(batches)
    spans = [(event.name, event.time_range.start, event.time_range.end) for event in trace.events()]
    sending = merged([span[1:] for span in spans if span[0].startswith("gloo:")])
    computing = merged([span[1:] for span in spans if span[0].startswith("aten::")])
    both = length(sending) + length(computing) - length(merged([*sending, *computing]))
    return both / length(sending)


def merged(spans: list[Any]) -> list[tuple[float, float]]:
    """The same time in spans that do not overlap."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def length(spans: list[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)


def table(
    options: argparse.Namespace,
    parameters: int,
    times: dict[str, list[float]],
    sent: dict[str, list[float]],
    hidden: dict[str, float],
) -> str:
    lines = [
        f"# Data parallel steps on {options.nproc} CPU ranks" + where(options),
        "",
        f"GPT-2 with {parameters / 1e6:.1f} M parameters in {options.dtype}, {options.accumulation} micro-batches of "
        f"{options.rows * LENGTH} tokens, torch {torch.__version__}, gloo, {options.rounds} rounds of {options.steps} "
        "steps. Ratios are medians of those within a round: a contestant's time by Stepmark's. Hidden is the share of "
        "the time in which rank 0 communicates that it computes in too, in a trace of two steps.",
        "",
        *([f"Stepmark sends gradients in {options.reduce_dtype}.", ""] if options.reduce_dtype != "float32" else []),
        machine(),
        "",
        "| | seconds per step | by Stepmark's | by that with zero_1 | MB sent per step"
        + (" and host" if options.gigabits else "")
        + " | hidden |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, each in times.items():
        ratios = [
            statistics.median(a / b for a, b in zip(each, times[ours], strict=True))
            for ours in ("Stepmark", "Stepmark, zero_1")
        ]
        megabytes = statistics.median(sent[name]) / 1e6
        shown = (
            f"{statistics.median(each):.3f} | {ratios[0]:.2f} | {ratios[1]:.2f} | {megabytes:.1f} | {hidden[name]:.0%}"
        )
        lines.append(f"| {name} | {shown} |")
    return "\n".join(lines) + "\n"


def where(options: argparse.Namespace) -> str:
    return f", on two hosts with {options.gigabits:g} Gbit/s between them" if options.gigabits else ""


def setting(options: argparse.Namespace) -> str:
    """What of the options tells one history from another."""
    parts = [f"{options.nproc} ranks", options.dtype, f"{options.accumulation} micro-batches"]
    parts += [] if options.layers == 6 else [f"{options.layers} layers of width {options.width}"]
    parts += [] if options.reduce_dtype == "float32" else [f"sent in {options.reduce_dtype}"]
    parts += [] if options.rows == 1 else [f"{options.rows} rows"]
    parts += [f"{options.gigabits:g} Gbit/s"] if options.gigabits else []
    return ", ".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument(
        "--without", nargs="*", choices=[*CONTESTANTS, *IN_BFLOAT16], help="contestants that memory has no room for"
    )
    parser.add_argument("--rows", type=int, default=1, help="sequences in a micro-batch")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--reduce-dtype", default="float32", choices=["float32", "bfloat16"], help="Stepmark's")
    parser.add_argument("--gigabits", type=float, help="between two hosts with half of the ranks each")
    add_arguments(parser)
    options = parser.parse_args()

    def start(command: Sequence[str]) -> int:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": two_nodes.INTERFACE}
        return run_on_two_hosts(command[1:], options.nproc, options.gigabits, environment)

    return on_ranks("data_parallel", setting(options), options, rank_main, start if options.gigabits else None)


if __name__ == "__main__":
    sys.exit(main())
