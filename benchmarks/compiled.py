"""Steps and first steps with torch.compile: Stepmark's `torch_compile` beside plain steps and torch.compile by hand.

    .venv-newest/bin/python benchmarks/compiled.py --models gpt2 llama --save
    .venv-newest/bin/python benchmarks/compiled.py --nproc 2 --save

Stepmark compiles layer by layer. By hand, the whole model is compiled and trained in a loop with the same AdamW and
clipping; several ranks of it have DistributedDataParallel. In one process, the contestants take their steps in turn,
round after round; printed are medians of seconds, and of their ratios to plain steps within a round. A first step is
timed in a process of its own, with an empty cache and again with that cache, as after a resumption; it begins when the
model is there. --save appends the numbers to benchmarks/results/compiled.csv.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
from keeping import keep, machine  # noqa: E402
from torch import nn  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM  # noqa: E402

from stepmark import Mesh  # noqa: E402
from stepmark.config.training_fields import TrainingFields  # noqa: E402
from stepmark.data.loader.batch import MicroBatch, StepBatch  # noqa: E402
from stepmark.launch.supervisor import supervise  # noqa: E402
from stepmark.training.compiled_layers import compile_layers  # noqa: E402
from stepmark.training.optimizer import build_optimizer  # noqa: E402
from stepmark.training.step import TrainStep  # noqa: E402
from stepmark.training.weighted_loss import MicroBatchLoss  # noqa: E402

VOCABULARY, LENGTH, ROWS, WIDTH, HEADS = 512, 128, 8, 128, 4
PLAIN, LAYERS, BY_HAND = "plain", "torch_compile", "torch.compile by hand"
Step = Callable[[], Any]


def make_model(kind: str, layers: int) -> nn.Module:
    torch.manual_seed(0)
    special = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=WIDTH, n_head=HEADS, **special)).train()
    sizes = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_attention_heads": HEADS}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes, **special)).train()


def make_step(contestant: str, kind: str, layers: int, mesh: Mesh) -> Step:
    model = make_model(kind, layers)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(mesh.data_parallel.rank))
    if contestant == BY_HAND:
        return _loop(model, ids, mesh)
    optimizer = build_optimizer("adamw_torch_fused", list(model.named_parameters()), mesh.runtime, learning_rate=1e-4)
    step = TrainStep(model, optimizer, MicroBatchLoss(model), mesh)
    if contestant == LAYERS:
        compile_layers(model, TrainingFields(torch_compile=True), static=True)
    batch = StepBatch([MicroBatch({"input_ids": ids, "labels": ids}, ROWS, ROWS * (LENGTH - 1))], ROWS, 0.0, {})
    return lambda: step(0, batch)


def _loop(model: nn.Module, ids: torch.Tensor, mesh: Mesh) -> Step:
    several = mesh.data_parallel.size > 1
    called: Any = torch.compile(nn.parallel.DistributedDataParallel(model) if several else model, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        called(input_ids=ids, labels=ids).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def first_step(contestant: str, options: argparse.Namespace, cache: str) -> float:
    """Seconds in a new process."""
    command = [
        sys.executable,
        __file__,
        "--first",
        contestant,
        "--models",
        options.model,
        "--layers",
        str(options.layers),
    ]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return float(told.splitlines()[-1])


def compare_steps(options: argparse.Namespace) -> None:
    mesh = Mesh.create()
    contestants = (PLAIN, LAYERS, BY_HAND)
    steps = {name: make_step(name, options.model, options.layers, mesh) for name in contestants}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(options.rounds + 2):
        for name in contestants[turn % 3 :] + contestants[: turn % 3]:
            mesh.context.host.barrier()
            begun = time.perf_counter()
            steps[name]()
            mesh.context.host.barrier()
            times[name].append(time.perf_counter() - begun)
    if mesh.context.host.rank:
        return
    lines = [
        f"# {options.model}, {options.layers} layers, {options.nproc} ranks",
        "",
        f"{machine()}, {options.rounds} rounds.",
        "",
        "| steps | milliseconds | by plain |",
        "| --- | --- | --- |",
    ]
    for name, each in times.items():
        pairs = zip(each[2:], times[PLAIN][2:], strict=True)
        ratio = statistics.median(own / plain for own, plain in pairs)
        lines.append(f"| {name} | {1000 * statistics.median(each[2:]):.0f} | {ratio:.3f} |")
    if options.nproc == 1 and options.first_steps:
        lines += ["", "| first step | seconds | with the cache |", "| --- | --- | --- |"]
        for name in (LAYERS, BY_HAND):
            with tempfile.TemporaryDirectory() as cache:
                cold, warm = first_step(name, options, cache), first_step(name, options, cache)
            lines.append(f"| {name} | {cold:.1f} | {warm:.1f} |")
    print("\n".join(lines))
    if options.save:
        keep("compiled", f"{options.model}, {options.layers} layers, {options.nproc} ranks", "\n".join(lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=["gpt2", "llama"], default=["gpt2", "llama"])
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-first-steps", dest="first_steps", action="store_false")
    parser.add_argument("--first", choices=[LAYERS, BY_HAND], help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    if options.nproc > 1 and "RANK" not in os.environ:
        return supervise([sys.executable, *sys.argv], options.nproc)
    for model in options.models:
        options.model = model
        if options.first:
            step = make_step(options.first, options.model, options.layers, Mesh.create())
            begun = time.perf_counter()
            step()
            print(time.perf_counter() - begun)
        else:
            compare_steps(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
