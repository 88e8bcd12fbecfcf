"""Expert parallelism over data parallel ranks of the CPU, beside that of transformers, over gloo.

    .venv/bin/python benchmarks/expert_parallel.py --nproc 2
    .venv/bin/python benchmarks/expert_parallel.py --nproc 4 --save

--save appends the numbers to benchmarks/results/expert_parallel.csv.

Forward and backward pass of one layer of experts, which all ranks divide, each with its own tokens. Contestants:
Stepmark's all-to-all; its static exchange, which lazy devices use; transformers' `AllToAllEP`. `--model` trains a
Qwen3-MoE instead: Stepmark's data parallel step beside FSDP2 × ep of transformers, with AdamW. Every rank holds all
contestants, and they take turns, round after round. A round is timed from barrier to barrier. Printed are medians, and
medians of ratios within a round: of time, and of the processor's seconds of all ranks, on which other processes have
little influence.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import tempfile
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
from keeping import keep, machine  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402
from transformers.distributed.expert_parallel import apply_expert_parallelism  # noqa: E402
from transformers.distributed.utils import initialize_distributed_mesh  # noqa: E402
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts  # noqa: E402

from stepmark import Mesh  # noqa: E402
from stepmark.launch.supervisor import supervise  # noqa: E402
from stepmark.parallel.tensor import expert_parallel  # noqa: E402
from stepmark.parallel.tensor.expert_parallel import ExpertParallelism  # noqa: E402
from stepmark.parallel.tensor.token_exchange import GatheredTokens  # noqa: E402

OURS, STATIC, THEIRS = "Stepmark, all-to-all", "Stepmark, static", "transformers"
GOAL = 1.0


def configuration(options: argparse.Namespace) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        hidden_size=options.width,
        moe_intermediate_size=options.width,
        num_experts=options.experts,
        num_experts_per_tok=options.chosen,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1024,
        experts_implementation="grouped_mm",
    )


class OneLayer(nn.Module):
    """A layer of experts where expert parallelism looks for one."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        self.config = config
        self.experts = Qwen3MoeExperts(config)
        torch.manual_seed(0)
        for parameter in self.parameters():
            parameter.data.normal_(std=config.hidden_size**-0.5)
        self._ep_plan = {"experts": "ep_dispatch_experts"}


def ours(whole: OneLayer, mesh: Mesh, static: bool) -> nn.Module:
    layer = copy.deepcopy(whole)
    experts = ExpertParallelism(layer, mesh, verified=False)
    count = layer.experts.num_experts // mesh.expert_parallel_size
    for name, each in list(layer.experts.named_parameters()):
        setattr(layer.experts, name, nn.Parameter(each.detach().split(count)[mesh.experts.rank].clone()))
    exchange = expert_parallel.token_exchange
    if static:
        expert_parallel.token_exchange = lambda mesh, *_: GatheredTokens(mesh.experts)
    experts.wire()
    expert_parallel.token_exchange = exchange
    return layer


def theirs(whole: OneLayer, mesh: Any) -> nn.Module:
    layer = copy.deepcopy(whole)
    plan = {f"experts.{name}": "grouped_gemm" for name in ("gate_up_proj", "down_proj")}
    plan["experts"] = "ep_dispatch_experts"
    model = nn.Module()
    apply_expert_parallelism(layer, mesh.get_mesh("ep"), mesh.get_mesh("tp"), plan, ep_implementation="all_to_all")
    with torch.no_grad():
        for (_, sharded), (_, each) in zip(layer.named_parameters(), whole.named_parameters(), strict=True):
            local = sharded.to_local()
            local.copy_(each.split(len(local))[mesh.get_mesh("ep").get_local_rank()])
    return layer


def rank_main(options: argparse.Namespace, out: Path) -> None:
    mesh = Mesh.create(device="cpu", expert_parallel_size=options.nproc)
    rank, size = mesh.context.world.rank, options.nproc
    _, other = initialize_distributed_mesh(DistributedConfig(fsdp_size=size, ep_size=size))
    config = configuration(options)
    config._experts_implementation = "grouped_mm"
    whole = OneLayer(config)
    layers = {OURS: ours(whole, mesh, False), STATIC: ours(whole, mesh, True), THEIRS: theirs(whole, other)}
    torch.manual_seed(rank)
    hidden = torch.randn(options.tokens, options.width, requires_grad=True)
    scores = torch.randn(options.tokens, options.experts, requires_grad=True)
    times: dict[str, list[float]] = {name: [] for name in layers}
    spent: dict[str, list[float]] = {name: [] for name in layers}
    found: dict[str, Any] = {}
    for turn in range(options.rounds + 1):  # the first warms up
        for name, layer in layers.items():
            dist.barrier()
            begun, before = time.perf_counter(), time.process_time()
            for _ in range(options.steps):
                hidden.grad = scores.grad = None
                layer.zero_grad()
                weights, index = scores.softmax(-1).topk(options.chosen)
                output = layer.experts(hidden, index, weights)
                output.square().sum().backward()
            taken = time.process_time() - before
            dist.barrier()
            if turn:
                times[name].append((time.perf_counter() - begun) / options.steps)
                total = torch.tensor(taken / options.steps)
                dist.all_reduce(total)
                spent[name].append(float(total))
            found[name] = [output.detach(), hidden.grad, scores.grad]
    for name in (STATIC, THEIRS):
        for a, b in zip(found[OURS], found[name]):
            assert (a - b).abs().max() < 1e-4 * b.abs().max(), (name, (a - b).abs().max(), b.abs().max())
    if rank == 0:
        lines = ["| exchange | seconds | processor seconds | times ours | of the processor |", "| --- | --- | --- | --- | --- |"]
        for name in layers:
            def ratio(of):
                return statistics.median(a / b for a, b in zip(of[name], of[OURS]))
            lines.append(f"| {name} | {statistics.median(times[name]):.4f} | {statistics.median(spent[name]):.4f} | {ratio(times):.2f} | {ratio(spent):.2f} |")
        print("\n".join(lines), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--chosen", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(arguments, arguments.out)
        return
    sys.exit(supervise([sys.executable, *sys.argv], nproc=arguments.nproc))


if __name__ == "__main__":
    main()
