"""Compares ZeRO-1 with torch's own sharded optimizers, on CPU ranks over gloo.

    .venv/bin/python benchmarks/zero1.py --nproc 2
    .venv/bin/python benchmarks/zero1.py --nproc 4 --save

--save appends the numbers to benchmarks/results/zero1.csv.

Contestants, all with fused AdamW and clipping of the global norm: Stepmark's ZeroRedundancyOptimizer;
torch.distributed's ZeroRedundancyOptimizer under DistributedDataParallel; FSDP2 (`fully_shard` on each block and the
model, parameters kept after the forward pass); and, without sharding, DistributedDataParallel with AdamW. All train the
same GPT-2 on the same data. Every rank holds all of them and runs them in turn, round after round; a round is timed
from barrier to barrier. Sent bytes are those of the loopback interface for all ranks in a step, so nothing else should
use it meanwhile. State bytes are those of the tensors in the optimizer's state, on the rank with the most.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from keeping import add_arguments, machine, on_ranks  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel  # noqa: E402

from stepmark import Mesh, ZeroRedundancyOptimizer  # noqa: E402

VOCABULARY, LENGTH, BATCH = 2048, 64, 1
LEARNING_RATE, MAX_NORM = 1e-4, 1.0
LOOPBACK = Path("/sys/class/net/lo/statistics/tx_bytes")


class Contestant:
    """A model with its optimizer; `step` trains one step and returns the loss."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, clip: bool) -> None:
        self.model = model
        self.optimizer = optimizer
        self.clip = clip

    def step(self, tokens: Tensor) -> float:
        loss = self.model(input_ids=tokens, labels=tokens).loss
        if isinstance(self.optimizer, ZeroRedundancyOptimizer):
            self.optimizer.last_backward()  # like the others, which overlap communication with every backward pass
        loss.backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)

    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank."""
        inner = getattr(self.optimizer, "optim", self.optimizer)
        if isinstance(self.optimizer, ZeroRedundancyOptimizer):
            return self.optimizer.state_bytes()
        values = [value for state in inner.state.values() for value in state.values()]
        return sum(value.to_local().nbytes if isinstance(value, DTensor) else value.nbytes for value in values)


def make_model(size: dict[str, int]) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, bos_token_id=0, eos_token_id=0, **none, **size)
    )


def stepmark_zero(size: dict[str, int], mesh: Mesh) -> Contestant:
    model = make_model(size)
    optimizer = ZeroRedundancyOptimizer(
        model.named_parameters(), torch.optim.AdamW, max_norm=MAX_NORM, mesh=mesh, lr=LEARNING_RATE
    )
    return Contestant(model, optimizer, clip=False)


def torch_zero(size: dict[str, int], mesh: Mesh) -> Contestant:
    model = DistributedDataParallel(make_model(size), gradient_as_bucket_view=True)
    optimizer = TorchZero(
        model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, fused=True, parameters_as_bucket_view=True
    )
    return Contestant(model, optimizer, clip=True)


def fsdp2(size: dict[str, int], mesh: Mesh) -> Contestant:
    model = make_model(size)
    for block in model.transformer.h:
        fully_shard(block, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    return Contestant(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True), clip=True)


def unsharded(size: dict[str, int], mesh: Mesh) -> Contestant:
    model = DistributedDataParallel(make_model(size), gradient_as_bucket_view=True)
    return Contestant(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True), clip=True)


CONTESTANTS: dict[str, Callable[[dict[str, int], Mesh], Contestant]] = {
    "Stepmark ZeRO-1": stepmark_zero,
    "torch ZeroRedundancyOptimizer": torch_zero,
    "FSDP2": fsdp2,
    "DDP, not sharded": unsharded,
}


def rank_main(rounds: int, steps: int, size: dict[str, int], out: Path) -> None:
    mesh = Mesh.create(device="cpu")
    rank = mesh.context.world.rank
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(rank))
    ours = {name: make(size, mesh) for name, make in CONTESTANTS.items()}
    times: dict[str, list[float]] = {name: [] for name in ours}
    sent: dict[str, list[float]] = {name: [] for name in ours}
    losses: dict[str, float] = {}
    for turn in range(rounds + 1):  # the first warms up
        for name, contestant in ours.items():
            dist.barrier()
            begun, before = time.perf_counter(), int(LOOPBACK.read_text())
            for _ in range(steps):
                losses[name] = contestant.step(tokens)
            dist.barrier()
            if turn:
                times[name].append((time.perf_counter() - begun) / steps)
                sent[name].append((int(LOOPBACK.read_text()) - before) / steps)
    state = {name: max(mesh.context.host.all_gather(c.state_bytes())) for name, c in ours.items()}
    if rank == 0:
        parameters = sum(p.numel() for p in make_model(size).parameters())
        out.write_text(table(parameters, mesh.shape["dp"], rounds, steps, times, sent, state, losses))


def table(
    parameters: int,
    ranks: int,
    rounds: int,
    steps: int,
    times: dict[str, list[float]],
    sent: dict[str, list[float]],
    state: dict[str, int],
    losses: dict[str, float],
) -> str:
    first = next(iter(times))
    lines = [
        f"# ZeRO-1 on {ranks} CPU ranks",
        "",
        f"GPT-2 with {parameters / 1e6:.1f} M parameters in float32, torch {torch.__version__}, gloo, {rounds} rounds "
        f"of {steps} steps. Ratios are medians of those within a round, to {first}.",
        "",
        machine(),
        "",
        "| | seconds per step | ratio | MB sent per step | MB of state per rank | final loss |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in times:
        ratio = statistics.median(t / o for t, o in zip(times[name], times[first], strict=True))
        lines.append(
            f"| {name} | {statistics.median(times[name]):.3f} | {ratio:.2f} | "
            f"{statistics.median(sent[name]) / 1e6:.1f} | {state[name] / 1e6:.2f} | {losses[name]:.5f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    add_arguments(parser)
    arguments = parser.parse_args()

    def measure(_: argparse.Namespace) -> None:
        size = {"n_layer": arguments.layers, "n_embd": arguments.width, "n_head": 8}
        rank_main(arguments.rounds, arguments.steps, size, arguments.out)

    return on_ranks("zero1", f"{arguments.nproc} ranks", arguments, measure)


if __name__ == "__main__":
    sys.exit(main())
