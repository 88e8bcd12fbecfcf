"""What a fixed order of sums costs, and what it costs to host several data parallel ranks in a process, on CPU ranks.

    .venv/bin/python benchmarks/logical_ranks.py --nproc 2

Stepmark's TrainStep with a GPT-2 of 20 M parameters, plain, with ZeRO-1 and with fsdp, in one run: with sums in the
order of the backend (gloo) and of logical ranks, which is the default between hosts; then, with two micro-batches of
each process, as two of one rank and as one of each of two ranks. Contestants take turns, round after round, each time
beginning with another one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace

from data_parallel import Step, rotated, with_stepmark
from keeping import add_arguments, machine, on_ranks
from zero1 import LENGTH, VOCABULARY

import torch  # isort: skip
import torch.distributed as dist

from stepmark import Mesh


def make(options: argparse.Namespace, ranks: str, micro_batches: int, form: str) -> tuple[Step, int]:
    total = dist.get_world_size() * micro_batches if ranks == "hosted" else None
    mesh = Mesh.create(device="cpu", data_parallel_replicas=total)
    if ranks == "backend":
        mesh.ranks = replace(mesh.ranks, fixed=False)
    accumulation = 1 if total else micro_batches
    given = argparse.Namespace(**{**vars(options), "accumulation": accumulation})
    fsdp = "shard_grad_op" if form == "fsdp" else None
    return with_stepmark(given, mesh, zero_1=form == "zero_1", fsdp=fsdp), micro_batches


FORMS = ("plain", "zero_1", "fsdp")
CONTESTANTS = {
    f"{form}, {words}": (ranks, micro_batches, form)
    for form in FORMS
    for words, ranks, micro_batches in (
        ("backend's order", "backend", 1),
        ("tree order", "tree", 1),
        ("2 micro-batches of a rank", "tree", 2),
        ("2 ranks in a process", "hosted", 2),
    )
}
BESIDE = {  # what each is compared with
    name: f"{form}, {base}"
    for form in FORMS
    for base, names in (
        ("backend's order", ("backend's order", "tree order")),
        ("2 micro-batches of a rank", ("2 micro-batches of a rank", "2 ranks in a process")),
    )
    for name in (f"{form}, {each}" for each in names)
}


def rank_main(options: argparse.Namespace) -> None:
    mesh = Mesh.create(device="cpu")
    generator = torch.Generator().manual_seed(mesh.context.world.rank)
    batches = [torch.randint(0, VOCABULARY, (1, LENGTH), generator=generator) for _ in range(2)]
    runs = {name: make(options, *what) for name, what in CONTESTANTS.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(options.rounds + 1):  # the first warms up
        for name in rotated(list(runs), turn):
            run, count = runs[name]
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(options.steps):
                run(batches[:count])
            run(None)
            dist.barrier()
            if turn:
                times[name].append((time.perf_counter() - begun) / options.steps)
    if mesh.context.world.rank == 0:
        options.out.write_text(table(options, times))


def table(options: argparse.Namespace, times: dict[str, list[float]]) -> str:
    lines = [
        f"# Logical ranks on {options.nproc} CPU ranks",
        "",
        f"{options.rounds} rounds of {options.steps} steps, torch {torch.__version__}, gloo. Ratios are medians of "
        "those within a round: the speed of a contestant, by that of the form's first or third.",
        "",
        machine(),
        "",
        "| | seconds per step | speed |",
        "| --- | --- | --- |",
    ]
    for name, each in times.items():
        ratio = statistics.median(base / own for base, own in zip(times[BESIDE[name]], each, strict=True))
        lines.append(f"| {name} | {statistics.median(each):.3f} | {ratio:.3f} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    add_arguments(parser)
    options = parser.parse_args()
    options.dtype, options.reduce_dtype, options.rows = "float32", "float32", 1
    return on_ranks("logical_ranks", f"{options.nproc} ranks", options, rank_main)


if __name__ == "__main__":
    sys.exit(main())
