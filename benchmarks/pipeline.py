"""Compares pipelines with torch.distributed.pipelining on the same stages, and with the other axes, on CPU ranks.

    .venv/bin/python benchmarks/pipeline.py --nproc 2
    .venv/bin/python benchmarks/pipeline.py --nproc 4 --save

--save appends the numbers to benchmarks/results/pipeline.csv.

The first table is about schedules: the passes of a step, without the update, of a small Llama whose layers take little
time, so that what remains is the schedule's own work and the transfers. Both contestants run the same modules, cut by
Stepmark, in turn, round after round; a round is timed from barrier to barrier, and processor seconds are those of all
ranks. torch 2.9.1 needs one line replaced to run over gloo: its first exchange sends 8 bytes and expects 4.

The second table is about meshes: complete steps of a larger Llama with the same global batch, all ranks along one axis.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from keeping import add_arguments, machine, on_ranks  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed import pipelining  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from stepmark import DataLoader, Mesh, parallelize  # noqa: E402
from stepmark.data.loader.batch import StepBatch  # noqa: E402
from stepmark.data.loader.labels import LabelRule  # noqa: E402
from stepmark.parallel.pipeline.schedules import ideal_idle_share  # noqa: E402
from stepmark.parallel.pipeline.staged_model import StagedModel, staged  # noqa: E402
from stepmark.training.expert_loads import ExpertLoads  # noqa: E402
from stepmark.training.micro_batches import StepHooks  # noqa: E402
from stepmark.training.optimizer import build_optimizer  # noqa: E402
from stepmark.training.pipelined_micro_batches import PipelinedSchedule  # noqa: E402
from stepmark.training.step import TrainStep  # noqa: E402
from stepmark.training.weighted_loss import MicroBatchLoss  # noqa: E402

logging.getLogger("torch.distributed.pipelining").setLevel(logging.ERROR)
pipelining.stage._PipelineStageBase._get_init_p2p_neighbors_ops = lambda self: []  # type: ignore[method-assign]

LENGTH, VOCABULARY, LAYERS = 32, 256, 8
SCHEDULES = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)]
Times = dict[str, list[tuple[float, float]]]  # of each round: seconds, and processor seconds of all ranks


def make_model(width: int, layers: int = LAYERS) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config).train()


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def a_batch(mesh: Mesh, samples: int, micro_batches: int) -> StepBatch:
    """This rank's share of a step of `samples` samples."""
    axis = mesh.data_parallel
    rows = samples // axis.size // micro_batches
    labels = LabelRule(causal_shift=True)
    loader = DataLoader(
        Samples(), rows, rank=axis.rank, world_size=axis.size, accumulation=micro_batches, labels=labels
    )
    return next(iter(loader))


def own_schedule(model: Any, mesh: Mesh, kind: str, batch: StepBatch) -> Callable[[], float]:
    """Runs the passes, and returns the loss on the last stage."""
    stages = staged(model)
    assert stages is not None
    optimizer = build_optimizer("sgd", list(model.named_parameters()), mesh.runtime)
    gradients = optimizer.gradients(mesh, accumulation=len(batch), reduce_dtype=torch.float32, on_arrival=False)
    loss, loads = MicroBatchLoss(model), ExpertLoads(stages.model, mesh)
    schedule = PipelinedSchedule(model, loss, gradients, mesh, None, None, 42, loads, stages, kind)
    return lambda: float(schedule.forward_backward(0, batch, StepHooks())[0])


class StageOfTorch(nn.Module):
    """One of this rank's stages, as torch calls it: hidden states by position, the batch by keyword."""

    def __init__(self, stages: StagedModel, number: int) -> None:
        super().__init__()
        self.part = stages.model
        self.stages, self.number = stages, number

    def forward(self, hidden: Tensor | None = None, **batch: Tensor) -> Tensor:
        received = None if hidden is None else lambda: hidden
        if self.number == self.stages.last:
            assert received is not None
            loss: Tensor = self.stages.final(received, lambda: self.part(**batch, use_cache=False).loss)
            return loss
        inputs = {"input_ids": batch["input_ids"], "use_cache": False}
        return self.stages.hidden_states(self.number, received, lambda: self.part(**inputs))


def torch_schedule(model: Any, mesh: Mesh, kind: str, batch: StepBatch) -> Callable[[], float]:
    """The same by torch. Its public `step` would cut one batch itself; micro-batches as they are go in by what it
    calls. Each loss is a mean, and all have as many targets."""
    stages = staged(model)
    assert stages is not None
    count, device = stages.plan.stages, torch.device("cpu")
    made = [pipelining.PipelineStage(StageOfTorch(stages, number), number, count, device) for number in stages.own]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output / len(batch)

    schedule: Any
    if kind == "interleaved":
        schedule = pipelining.ScheduleInterleaved1F1B(made, len(batch), loss_fn=loss, scale_grads=False)
    else:
        classes: dict[str, Any] = {"1f1b": pipelining.Schedule1F1B, "gpipe": pipelining.ScheduleGPipe}
        schedule = classes[kind](made[0], len(batch), loss_fn=loss, scale_grads=False)
    inputs = [dict(each.inputs) for each in batch.micro_batches]

    def run() -> float:
        losses: list[Tensor] = []
        for each in made:
            each.has_backward = True
            each.clear_runtime_states()
        schedule._step_microbatches([() for _ in inputs], inputs, [each["labels"] for each in inputs], losses)
        return float(sum(losses))

    return run


CONTESTANTS: dict[str, Callable[[Any, Mesh, str, StepBatch], Callable[[], float]]] = {
    "Stepmark": own_schedule,
    "torch.distributed.pipelining": torch_schedule,
}


def in_turn(mesh: Mesh, contestants: dict[str, Callable[[], Any]], rounds: int, steps: int) -> Times:
    """Runs the contestants in turn; the first round warms up."""
    times: Times = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name, run in contestants.items():
            dist.barrier()
            began, spent = time.perf_counter(), time.process_time()
            for _ in range(steps):
                run()
            spent = time.process_time() - spent
            dist.barrier()
            seconds = time.perf_counter() - began
            total = sum(mesh.context.host.all_gather(spent))
            if turn:
                times[name].append((seconds / steps, total / steps))
    return times


def compare_schedules(mesh: Mesh, micro_batches: int, rounds: int, steps: int) -> list[str]:
    lines = [
        "| schedule | | processor seconds a step, all ranks | ratio | seconds a step | ratio | loss |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind, chunks in SCHEDULES:
        batch = a_batch(mesh, 2 * micro_batches, micro_batches)
        model = parallelize(make_model(32), mesh, pipeline_chunks=chunks)
        runs = {name: make(model, mesh, kind, batch) for name, make in CONTESTANTS.items()}
        losses = {}
        for name, run in runs.items():
            losses[name] = max(mesh.context.host.all_gather(run()))
        lines += rows(kind, in_turn(mesh, runs, rounds, steps), losses)
    return lines


def rows(kind: str, times: Times, losses: dict[str, float]) -> list[str]:
    first = next(iter(times))
    lines = []
    for name, measured in times.items():
        pairs = list(zip(measured, times[first], strict=True))
        spent = statistics.median(own[1] / theirs[1] for own, theirs in pairs)
        took = statistics.median(own[0] / theirs[0] for own, theirs in pairs)
        seconds, processor = (statistics.median(each[at] for each in measured) for at in (0, 1))
        lines.append(
            f"| {kind} | {name} | {processor:.4f} | {spent:.2f} | {seconds:.4f} | {took:.2f} | {losses[name]:.6f} |"
        )
    return lines


def compare_meshes(ranks: int, width: int, micro_batches: int, rounds: int) -> list[str]:
    samples = 2 * micro_batches
    kinds: dict[str, tuple[dict[str, int], int]] = {
        f"pipeline parallel {ranks}": ({"pipeline_parallel_size": ranks}, micro_batches),
        f"tensor parallel {ranks}": ({"tensor_parallel_size": ranks}, 1),
        f"data parallel {ranks}": ({}, 1),
    }
    runs: dict[str, Callable[[], Any]] = {}
    losses: dict[str, float] = {}
    mesh = Mesh.create(device="cpu")
    for name, (sizes, accumulation) in kinds.items():
        mesh = Mesh.create(**sizes, device="cpu")
        model = make_model(width)
        parallelize(model, mesh)
        stages = mesh.context.host if mesh.pipeline.size > 1 else None
        optimizer = build_optimizer("adamw_torch", list(model.named_parameters()), mesh.runtime, stages=stages)
        step = TrainStep(model, optimizer, MicroBatchLoss(model), mesh, accumulation=accumulation)
        batch = a_batch(mesh, samples, accumulation)
        runs[name] = lambda step=step, batch=batch: step(0, batch)
        losses[name] = float(runs[name]().values[0])
    lines = [
        "| | | processor seconds a step, all ranks | ratio | seconds a step | ratio | loss of the first step |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    return lines + rows("", in_turn(mesh, runs, rounds, 1), losses)


def rank_main(rounds: int, steps: int, micro_batches: int, width: int, out: Path) -> None:
    mesh = Mesh.create(pipeline_parallel_size=int(os.environ["WORLD_SIZE"]), device="cpu")
    ranks = mesh.pipeline.size
    schedules = compare_schedules(mesh, micro_batches, rounds, steps)
    meshes = compare_meshes(ranks, width, micro_batches, rounds)
    if mesh.context.world.rank == 0:
        idle = ideal_idle_share(ranks, micro_batches)
        text = [
            f"# Pipelines of {ranks} CPU ranks",
            "",
            f"Llama with {LAYERS} layers in float32, {micro_batches} micro-batches of 2 samples of {LENGTH} tokens, "
            f"torch {torch.__version__}, gloo, {rounds} rounds. Ratios are medians of those within a round, to the "
            "first of each table's group.",
            "",
            machine(),
            "",
            f"## Schedules: {steps} times the passes of a step, width 32",
            "",
            *schedules,
            "",
            f"## Meshes: a step, width {width}; 1f1b waits {idle:.0%} of a step by theory",
            "",
            *meshes,
        ]
        out.write_text("\n".join(text) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    add_arguments(parser)
    arguments = parser.parse_args()

    def measure(_: argparse.Namespace) -> None:
        rank_main(arguments.rounds, arguments.steps, arguments.micro_batches, arguments.width, arguments.out)

    return on_ranks("pipeline", f"{arguments.nproc} ranks", arguments, measure)


if __name__ == "__main__":
    sys.exit(main())
