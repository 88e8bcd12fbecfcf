"""Expert parallelism over data parallel ranks of the CPU, beside that of transformers, over gloo.

    .venv/bin/python benchmarks/expert_parallel.py --nproc 2
    .venv/bin/python benchmarks/expert_parallel.py --nproc 4 --model --save

--save appends the numbers to benchmarks/results/expert_parallel.csv. torch_xla must not be installed: transformers'
all-to-all does not run beside it.

All ranks divide the experts, and each has its own tokens. Contestants: Stepmark's all-to-all; its static exchange,
which lazy devices use; transformers' all-to-all. Measured are the forward and backward pass of one layer of experts, or
with --model a step of a Qwen3-MoE with AdamW: Stepmark's with ZeRO-1, transformers' with FSDP2. Every rank holds all
contestants, which must compute the same, and runs them in turn, round after round. Printed are medians, and medians of
ratios within a round: of the time from barrier to barrier, and of the processor's seconds of all ranks, on which other
processes have little influence.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from keeping import add_arguments, machine, on_ranks  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402
from transformers.distributed.expert_parallel import apply_expert_parallelism  # noqa: E402
from transformers.distributed.utils import initialize_distributed_mesh  # noqa: E402
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts  # noqa: E402

from stepmark import Mesh, ZeroRedundancyOptimizer, parallelize  # noqa: E402
from stepmark.parallel.tensor import expert_parallel  # noqa: E402
from stepmark.parallel.tensor.token_exchange import GatheredTokens  # noqa: E402

OURS, STATIC, THEIRS = "Stepmark, all-to-all", "Stepmark, static", "transformers"
VOCABULARY, LENGTH, LEARNING_RATE = 512, 128, 1e-4
GOAL = 1.0
Step = Callable[[], list[Tensor]]  # returns what all contestants must agree on
Made = Callable[[argparse.Namespace, Mesh, Path], Step]


def configuration(options: argparse.Namespace) -> Qwen3MoeConfig:
    config = Qwen3MoeConfig(
        hidden_size=options.width,
        moe_intermediate_size=options.width,
        num_experts=options.experts,
        num_experts_per_tok=options.chosen,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        head_dim=options.width // 4,  # type: ignore[call-arg]
    )
    config._experts_implementation = "grouped_mm"
    return config


@contextmanager
def static_exchange(static: bool) -> Iterator[None]:
    """Inside the block, modules that are divided get the exchange of lazy devices."""
    usual = expert_parallel.token_exchange
    if static:
        expert_parallel.token_exchange = lambda mesh, *_: GatheredTokens(mesh.experts)
    try:
        yield
    finally:
        expert_parallel.token_exchange = usual


class OneLayer(nn.Module):
    """A layer of experts, found where a model has them."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        self.config = config
        self.experts = Qwen3MoeExperts(config)
        self._ep_plan = {"experts": "ep_dispatch_experts"}
        torch.manual_seed(0)
        for parameter in self.parameters():
            parameter.data.normal_(std=config.hidden_size**-0.5)


def layer_step(layer: Any, options: argparse.Namespace, rank: int) -> Step:
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(options.tokens, options.width, generator=generator).requires_grad_()
    scores = torch.randn(options.tokens, options.experts, generator=generator).requires_grad_()

    def step() -> list[Tensor]:
        layer.zero_grad()
        hidden.grad = scores.grad = None
        weights, index = scores.softmax(-1).topk(options.chosen)
        output = layer.experts(hidden, index, weights)
        output.square().sum().backward()
        assert hidden.grad is not None
        assert scores.grad is not None
        return [output.detach(), hidden.grad, scores.grad]

    return step


def our_layer(static: bool) -> Made:
    def make(options: argparse.Namespace, mesh: Mesh, folder: Path) -> Step:
        layer = OneLayer(configuration(options))
        with static_exchange(static):
            experts = expert_parallel.ExpertParallelism(layer, mesh, verified=False)
            for name, whole in list(layer.experts.named_parameters()):
                own = whole.detach().chunk(options.nproc)[mesh.experts.rank]
                setattr(layer.experts, name, nn.Parameter(own.clone()))
            experts.wire()
        return layer_step(layer, options, mesh.context.world.rank)

    return make


def their_layer(options: argparse.Namespace, mesh: Mesh, folder: Path) -> Step:
    layer = OneLayer(configuration(options))
    whole = copy.deepcopy(layer)
    _, axes = initialize_distributed_mesh(DistributedConfig(fsdp_size=options.nproc, ep_size=options.nproc))
    plan = {f"experts.{name}": "grouped_gemm" for name, _ in layer.experts.named_parameters()}
    plan |= layer._ep_plan
    apply_expert_parallelism(layer, axes.get_mesh("ep"), axes.get_mesh("tp"), plan, ep_implementation="all_to_all")
    with torch.no_grad():
        shards: Any = layer.parameters()
        for shard, each in zip(shards, whole.parameters(), strict=True):
            shard.to_local().copy_(each.chunk(options.nproc)[mesh.experts.rank])
    return layer_step(layer, options, mesh.context.world.rank)


def model_step(model: Any, optimizer: torch.optim.Optimizer, options: argparse.Namespace, rank: int) -> Step:
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, VOCABULARY, (options.tokens // LENGTH, LENGTH), generator=generator)

    def step() -> list[Tensor]:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach()]

    return step


def our_model(static: bool) -> Made:
    def make(options: argparse.Namespace, mesh: Mesh, folder: Path) -> Step:
        model = Qwen3MoeForCausalLM.from_pretrained(folder, experts_implementation="grouped_mm", dtype=torch.float32)
        with static_exchange(static):
            parallelize(model, mesh)
        optimizer = ZeroRedundancyOptimizer(
            model.named_parameters(), torch.optim.AdamW, mesh=mesh, lr=LEARNING_RATE, max_norm=None
        )
        return model_step(model.train(), optimizer, options, mesh.context.world.rank)

    return make


def their_model(options: argparse.Namespace, mesh: Mesh, folder: Path) -> Step:
    axes = DistributedConfig(fsdp_size=options.nproc, ep_size=options.nproc, ep_implementation="all_to_all")
    model = Qwen3MoeForCausalLM.from_pretrained(
        folder, experts_implementation="grouped_mm", dtype=torch.float32, distributed_config=axes
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)
    return model_step(model.train(), optimizer, options, mesh.context.world.rank)


def contestants(options: argparse.Namespace) -> dict[str, Made]:
    if options.model:
        return {OURS: our_model(False), STATIC: our_model(True), THEIRS: their_model}
    return {OURS: our_layer(False), STATIC: our_layer(True), THEIRS: their_layer}


def rank_main(options: argparse.Namespace) -> None:
    mesh = Mesh.create(device="cpu", expert_parallel_size=options.nproc)
    folder = options.out.with_name("model")
    if options.model and mesh.context.world.rank == 0:
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(configuration(options)).save_pretrained(folder)
    dist.barrier()
    steps = {name: make(options, mesh, folder) for name, make in contestants(options).items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    spent: dict[str, list[float]] = {name: [] for name in steps}
    first: dict[str, list[Tensor]] = {}
    for turn in range(options.rounds + 1):  # the first warms up
        for name, step in steps.items():
            dist.barrier()
            begun, before = time.perf_counter(), time.process_time()
            for _ in range(options.steps):
                values = step()
                first.setdefault(name, [each.clone() for each in values])
            taken = torch.tensor(time.process_time() - before)
            dist.barrier()
            if turn:
                times[name].append((time.perf_counter() - begun) / options.steps)
                dist.all_reduce(taken)
                spent[name].append(float(taken) / options.steps)
    for values in first.values():
        torch.testing.assert_close(values, first[OURS], rtol=1e-3, atol=1e-4)
    if mesh.context.world.rank == 0:
        options.out.write_text(table(options, times, spent))


def table(options: argparse.Namespace, times: dict[str, list[float]], spent: dict[str, list[float]]) -> str:
    def ratio(of: dict[str, list[float]], name: str) -> float:
        return statistics.median(a / b for a, b in zip(of[name], of[OURS], strict=True))

    lines = [
        f"{machine()}, medians of {options.rounds} rounds of {options.steps} steps. Ratios are to {OURS}.",
        "",
        "| | seconds a step | ratio | processor seconds | ratio of them |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in times:
        cells = (
            f"{statistics.median(times[name]):.4f} | {ratio(times, name):.2f} | {statistics.median(spent[name]):.4f}"
        )
        lines.append(f"| {name} | {cells} | {ratio(spent, name):.2f} |")
    reached = ratio(spent, THEIRS)
    verdict = "holds" if reached >= GOAL else "MISSED"
    lines += ["", f"- {verdict}: processor seconds of transformers by ours (at least {GOAL:g}): {reached:.2f}"]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--model", action="store_true", help="steps of a model, not of one layer of experts")
    parser.add_argument("--tokens", type=int, default=1024, help="of each rank")
    parser.add_argument("--width", type=int, default=256, help="of the hidden states, and of each expert")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--chosen", type=int, default=4, help="experts a token")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    add_arguments(parser)
    arguments = parser.parse_args()
    shape = f"{arguments.tokens} tokens, {arguments.chosen} of {arguments.experts} experts"
    what = "a model" if arguments.model else "a layer"
    return on_ranks("expert_parallel", f"{arguments.nproc} ranks, {what}, {shape}", arguments, rank_main)


if __name__ == "__main__":
    sys.exit(main())
