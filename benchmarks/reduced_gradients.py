"""Losses of runs whose ranks send each other gradients in bfloat16, beside float32, on CPU ranks over gloo.

    .venv/bin/python benchmarks/reduced_gradients.py --nproc 2
    .venv/bin/python benchmarks/reduced_gradients.py --nproc 4 --save

A small GPT-2 and a small Llama train on bytes of the standard library's source, in plain data parallel form and with
ZeRO-1, on the same samples in the same order. Beside `reduce_dtype="bfloat16"`, which keeps nothing from step to step,
runs the same with error feedback: each rank adds to its gradient what rounding took from the last one. To show what a
difference means, float32 runs once more with weights of which each is another by one bit. --save appends the numbers to
benchmarks/results/reduced_gradients.csv.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # isort: skip
from keeping import add_arguments, machine, on_ranks
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from stepmark import Mesh
from stepmark.data.loader.batch import MicroBatch, StepBatch
from stepmark.runtime.collectives import GroupCollectives
from stepmark.training.optimizer import build_optimizer
from stepmark.training.step import TrainStep
from stepmark.training.weighted_loss import MicroBatchLoss

LENGTH, ROWS, WIDTH = 128, 4, 128
LOOPBACK = Path("/sys/class/net/lo/statistics/tx_bytes")
CONFIGURATIONS = {
    "GPT-2": GPT2Config(n_layer=2, n_embd=WIDTH, n_head=4, n_positions=LENGTH, vocab_size=256, resid_pdrop=0.0,
                        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0),
    "Llama": LlamaConfig(num_hidden_layers=2, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_attention_heads=4,
                         max_position_embeddings=LENGTH, vocab_size=256, bos_token_id=0, eos_token_id=0),
}  # fmt: skip
VARIANTS = ("float32", "float32, weights off by a bit", "bfloat16", "bfloat16, error feedback", "bfloat16, zero_1")


def make_model(kind: str, variant: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(CONFIGURATIONS[kind]).train()
    if "off by a bit" in variant:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.nextafter(parameter, torch.full_like(parameter, torch.inf)))
    return model


@contextmanager
def error_feedback(variant: str) -> Iterator[None]:
    """What rounding takes from a bucket is added to it in the next step."""
    if "error feedback" not in variant:
        yield
        return
    kept: dict[int, Tensor] = {}
    sums = GroupCollectives.start_all_reduce

    def start(axis: GroupCollectives, tensor: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
        if tensor.data_ptr() in kept:
            tensor.add_(kept[tensor.data_ptr()])
        rounded = tensor.to(dtype).float()
        kept[tensor.data_ptr()] = tensor - rounded
        return sums(axis, tensor.copy_(rounded), dtype)

    with patch.object(GroupCollectives, "start_all_reduce", start):
        yield


def train(kind: str, variant: str, steps: int, mesh: Mesh, text: Tensor) -> tuple[list[float], float]:
    """The loss of every step, and the MB that all ranks send in one."""
    model = make_model(kind, variant)
    optimizer = build_optimizer(
        "adamw_torch_fused",
        list(model.named_parameters()),
        mesh.runtime,
        learning_rate=1e-3,
        sharded_over=mesh if "zero_1" in variant else None,
    )
    dtype = getattr(torch, variant.partition(",")[0])
    step = TrainStep(model, optimizer, MicroBatchLoss(model), mesh, reduce_dtype=dtype)
    generator = torch.Generator().manual_seed(mesh.data_parallel.rank)
    losses = []
    before = 0
    with error_feedback(variant):
        for number in range(steps):
            if number == 2:  # the first steps learn in which order gradients come
                mesh.context.host.barrier()
                before = int(LOOPBACK.read_text())
            begins = torch.randint(0, len(text) - LENGTH, (ROWS,), generator=generator).tolist()
            tokens = torch.stack([text[begin : begin + LENGTH] for begin in begins])
            batch = MicroBatch({"input_ids": tokens, "labels": tokens}, ROWS, ROWS * (LENGTH - 1))
            losses.append(float(step(number, StepBatch([batch], ROWS, 0.0, {})).values[0]))
    mesh.context.host.barrier()
    return losses, (int(LOOPBACK.read_text()) - before) / (steps - 2) / 1e6


def rank_main(options: argparse.Namespace) -> None:
    mesh = Mesh.create(device="cpu")
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    data = b"".join(path.read_bytes() for path in sources)
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    lines = [
        f"# Losses with gradients in bfloat16, {options.nproc} CPU ranks",
        "",
        f"{options.steps} steps of {ROWS} times {LENGTH} bytes a rank, {len(data) / 1e6:.1f} MB of text, AdamW at "
        "1e-3. Losses are means of 25 steps up to the one named.",
        "",
        machine(),
    ]
    marks = [mark for mark in (50, 100, 200, 300, 400, 500) if mark <= options.steps]
    for kind in CONFIGURATIONS:
        parameters = sum(each.numel() for each in make_model(kind, "").parameters())
        heads = " | ".join(f"loss at {mark}" for mark in marks)
        lines += ["", f"## {kind}, {parameters / 1e6:.2f} M parameters", ""]
        lines += [f"| gradients sent in | {heads} | largest difference from float32 | MB sent a step |"]
        lines += ["| --- |" + " --- |" * (len(marks) + 2)]
        reference: list[float] = []
        for variant in VARIANTS:
            losses, sent = train(kind, variant, options.steps, mesh, text)
            means = [sum(losses[mark - 25 : mark]) / 25 for mark in range(25, len(losses) + 1)]
            reference = reference or means
            worst = max(abs(a - b) for a, b in zip(means, reference, strict=True))
            shown = " | ".join(f"{means[mark - 25]:.4f}" for mark in marks)
            lines.append(f"| {variant} | {shown} | {worst:.4f} | {sent:.2f} |")
    if mesh.context.world.rank == 0:
        options.out.write_text("\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--steps", type=int, default=500, choices=range(50, 501), metavar="50 to 500")
    add_arguments(parser)
    options: Any = parser.parse_args()
    return on_ranks("reduced_gradients", f"{options.nproc} ranks", options, rank_main)


if __name__ == "__main__":
    sys.exit(main())
