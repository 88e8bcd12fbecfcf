"""What a step of the Trainer's costs the host beyond a loop by hand: operations, calls, reads and time.

    OMP_NUM_THREADS=1 .venv-newest/bin/python benchmarks/step_host_costs.py --save

Six models of transformers, as deep as the real ones and narrow, so that what is left is the host's work, which is the
same at any width: a GPT-2, a BERT that classifies sentences, two Llamas, a Mixtral and a Qwen3-MoE. For each, the mean
of some steps after a warm-up, counted in three passes of their own:

operations   that torch dispatches, of the forward and backward passes, clipping and the update. Those that take the
             norm of the gradients are counted apart: on a CPU a tensor's norm is an operation, on a GPU that of all.
calls        of functions, those of Python and those of extension modules
reads        of values of tensors: `item`, `tolist`, a tensor in an `if`; not while a batch is made. A host has them:
             that no step waits for an accelerator, tests/runtime/test_native_waits.py shows.
milliseconds of the processor that the main thread takes, not counting its waits: the lower quartile of the steps of all
             rounds, since what else runs on the machine makes some slower and none faster

The contestants take turns, each time beginning with another one: a loop by hand, Stepmark's Trainer, and with
--transformers also the Trainer of that library.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402
from keeping import keep, machine  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen3MoeConfig,
    TrainerCallback,
)

import stepmark  # noqa: E402

BY_HAND, OURS, THEIRS = "by hand", "stepmark", "transformers"
WARM_UP = 4
VOCABULARY, LENGTH, WIDTH, BATCH = 256, 16, 32, 2
SIZE = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 64, "num_attention_heads": 4,
        "max_position_embeddings": LENGTH}  # fmt: skip
GROUPED = {**SIZE, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
MODELS: dict[str, Callable[[], Any]] = {
    "GPT-2, 12 layers": lambda: GPT2Config(n_layer=12, n_embd=WIDTH, n_head=4, n_positions=LENGTH,
                                           vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0),
    "BERT, 12 layers": lambda: BertConfig(num_hidden_layers=12, **SIZE),
    "Llama, 16 layers": lambda: LlamaConfig(num_hidden_layers=16, **GROUPED),
    "Llama, 32 layers": lambda: LlamaConfig(num_hidden_layers=32, **GROUPED),
    "Mixtral, 32 layers, 8 experts": lambda: MixtralConfig(num_hidden_layers=32, num_local_experts=8, **GROUPED),
    "Qwen3-MoE, 48 layers, 16 experts": lambda: Qwen3MoeConfig(num_hidden_layers=48, num_experts=16, **GROUPED,
                                                               num_experts_per_tok=2, moe_intermediate_size=16),
}  # fmt: skip

NORMS = ("aten.linalg_vector_norm", "aten._foreach_norm")
READS = ("aten._local_scalar_dense", "aten.equal", "aten.nonzero", "aten.is_nonzero")  # operations
READERS = ("tolist", "numpy")  # methods of tensors that read what is on a host without an operation


class Blocks(torch.utils.data.Dataset):
    """Random tokens; their labels are the tokens themselves, or a class of each sample."""

    def __init__(self, steps: int, *, classes: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(2, VOCABULARY, (BATCH * steps, LENGTH), generator=generator)
        self.labels = self.tokens[:, 0] % 2 if classes else self.tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def makes_batch() -> bool:
    """Whether a collator is running, which works on the host."""
    frame: Any = sys._getframe()
    while frame is not None:
        if "/data/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def make_model(name: str) -> Any:
    torch.manual_seed(0)
    config = MODELS[name]()
    config.use_cache = False  # which both Trainers say to a model, and a loop by hand has to
    kind = AutoModelForSequenceClassification if isinstance(config, BertConfig) else AutoModelForCausalLM
    return kind.from_config(config)


class Operations(TorchDispatchMode):
    """Counts what torch dispatches in this thread, with the backward passes of a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        self.counts[name] = self.counts.get(name, 0) + 1
        self.reads += name in READS and not makes_batch()
        return func(*args, **(kwargs or {}))


class Calls:
    """Counts calls in this thread."""

    def __init__(self) -> None:
        self.count = self.reads = 0

    def __enter__(self) -> None:
        sys.setprofile(self._see)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: Any, event: str, called: Any) -> None:
        self.count += event in ("call", "c_call")
        reads = event == "c_call" and getattr(called, "__name__", "") in READERS
        self.reads += reads and isinstance(getattr(called, "__self__", None), torch.Tensor) and not makes_batch()


@dataclass
class Costs:
    """Of a step. See the module."""

    operations: float = 0.0
    norms: float = 0.0
    calls: float = 0.0
    reads: float = 0.0
    milliseconds: list[float] = field(default_factory=list)  # of each step

    @property
    def usual(self) -> float:
        return statistics.quantiles(self.milliseconds, n=4)[0] if self.milliseconds else 0.0


class Meter(TrainerCallback):
    """Measures from the end of one step to that of another. `measure`: what is counted, or the time."""

    def __init__(self, steps: int, measure: str) -> None:
        self._steps, self._measure = steps, measure
        self._seen, self._began = 0, 0.0
        self._operations, self._calls = Operations(), Calls()
        self.costs = Costs()

    def tick(self) -> None:
        """A step has ended."""
        self._seen += 1
        counts: Any = {"operations": self._operations, "calls": self._calls}.get(self._measure)
        now = time.thread_time()
        if self._seen > WARM_UP and counts is None:
            self.costs.milliseconds.append((now - self._began) * 1000)
        if self._seen == WARM_UP and counts is not None:
            counts.__enter__()
        elif self._seen == WARM_UP + self._steps and counts is not None:
            counts.__exit__(None, None, None)
            self._count()
        self._began = time.thread_time()

    def _count(self) -> None:
        counts, reads = self._operations.counts, self._operations.reads + self._calls.reads
        self.costs.norms = sum(counts.get(name, 0) for name in NORMS) / self._steps
        self.costs.operations = sum(counts.values()) / self._steps - self.costs.norms
        self.costs.calls, self.costs.reads = self._calls.count / self._steps, reads / self._steps

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.tick()


def by_hand(name: str, data: Blocks, meter: Meter) -> None:
    model = make_model(name).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (len(data) + 1))
    for batch in torch.utils.data.DataLoader(data, BATCH, shuffle=True):
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        meter.tick()


def fields(data: Blocks, folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": len(data) // BATCH,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 1e-4,
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }


def with_stepmark(name: str, data: Blocks, meter: Meter) -> None:
    with tempfile.TemporaryDirectory() as folder:
        args = stepmark.TrainingArguments(device="cpu", **fields(data, folder))
        stepmark.Trainer(make_model(name), args, train_dataset=data, callbacks=[meter]).train()


def with_transformers(name: str, data: Blocks, meter: Meter) -> None:
    with tempfile.TemporaryDirectory() as folder:
        own = {"use_cpu": True, "dataloader_pin_memory": False, "optim": "adamw_torch_fused"}
        args = transformers.TrainingArguments(**own, **fields(data, folder))
        trainer = transformers.Trainer(make_model(name), args, train_dataset=data, callbacks=[meter])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()


RUNNERS = {BY_HAND: by_hand, OURS: with_stepmark, THEIRS: with_transformers}


def once(runner: str, name: str, steps: int, measure: str) -> Costs:
    meter = Meter(steps, measure)
    RUNNERS[runner](name, Blocks(WARM_UP + steps + 1, classes=name.startswith("BERT")), meter)
    return meter.costs


def measure(name: str, runners: list[str], steps: int, rounds: int) -> dict[str, Costs]:
    """Each contestant's costs of a step."""
    found = {}
    for runner in runners:
        counted, called = once(runner, name, steps, "operations"), once(runner, name, steps, "calls")
        found[runner] = Costs(counted.operations, counted.norms, called.calls, counted.reads + called.reads)
    for index in range(rounds):
        begin = index % len(runners)
        for runner in runners[begin:] + runners[:begin]:
            found[runner].milliseconds += once(runner, name, steps, "time").milliseconds
    return found


def rows(name: str, found: dict[str, Costs]) -> list[str]:
    hand, lines = found[BY_HAND], []
    for runner, costs in found.items():
        more, beyond = costs.operations / hand.operations, costs.usual - hand.usual
        lines.append(
            f"| {name} | {runner} | {costs.operations:.0f} | {more:.3f} | {costs.norms:.0f} | {costs.calls:.0f} | "
            f"{costs.reads:.1f} | {costs.usual:.2f} | {beyond:.2f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="MODEL")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transformers", action="store_true", help="measure its Trainer too")
    parser.add_argument("--save", action="store_true", help="append the numbers to results/step_host_costs.csv")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runners = [BY_HAND, OURS, *([THEIRS] if options.transformers else [])]
    lines = [
        "| | | operations | beside by hand | norms | calls | reads | ms | ms beyond by hand |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in options.models:
        found = rows(name, measure(name, runners, options.steps, options.rounds))
        print(*found, sep="\n", flush=True)
        lines += found
    table = "\n".join([machine(), f"width {WIDTH}, {BATCH} x {LENGTH} tokens, {options.steps} steps", "", *lines])
    print(f"\n{table}")
    if options.save:
        keep("step_host_costs", "cpu", table)


if __name__ == "__main__":
    main()
