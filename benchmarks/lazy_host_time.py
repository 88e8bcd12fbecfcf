"""What a step costs the host on a lazy device: seconds in which Python traces the step and submits its graph.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/lazy_host_time.py --layers 12 48 --save

GPT-2 of so many layers, narrow so that the device has little to do. The contestants take turns, round after round, in
processes of their own: a loop by hand with `torch_xla.sync`, the same step under `torch_xla.compile`, Stepmark's
Trainer, and the Trainer with `zero_1`, which updates flat buckets in place of single parameters. Before each step the
device is drained; the host's time ends where the step is submitted. Printed are medians in milliseconds, and the median
of the ratios to the loop by hand within a round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("PJRT_DEVICE", "CPU")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
from apart import apart  # noqa: E402
from keeping import keep, machine  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback  # noqa: E402

import stepmark  # noqa: E402

BY_HAND = "by hand"
BAR = 1.05  # of the loop by hand
WARM_UP, STEPS = 4, 12
VOCABULARY, LENGTH, WIDTH, BATCH = 512, 32, 64, 2


class Blocks(torch.utils.data.Dataset):
    """Random tokens, enough for every step."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, VOCABULARY, (BATCH * STEPS, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def make_model(layers: int) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    size = {"n_layer": layers, "n_embd": WIDTH, "n_head": 4, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **size))


class HostTime(TrainerCallback):
    """The host's seconds in each step after the warm-up; between steps the device is drained."""

    def __init__(self) -> None:
        import torch_xla.core.xla_model as xm

        self.seconds: list[float] = []
        self._drain: Callable[[], None] = xm.wait_device_ops

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._drain()
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds[WARM_UP:])


def by_hand(layers: int, *, compiled: bool = False) -> float:
    """A loop as torch_xla's documentation shows it; `compiled`: its step under `torch_xla.compile`."""
    import torch_xla

    device = torch_xla.device()
    model = make_model(layers).to(device)
    model.tie_weights()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (STEPS + 1))
    clock = HostTime()

    def compute(batch: dict[str, torch.Tensor]) -> None:
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step = torch_xla.compile(compute) if compiled else compute
    for batch in torch.utils.data.DataLoader(Blocks(), BATCH):
        on_device = {name: tensor.to(device) for name, tensor in batch.items()}
        clock.on_step_begin()
        step(on_device)
        schedule.step()
        if not compiled:
            torch_xla.sync()
        clock.on_step_end()
    return clock.median


def with_stepmark(layers: int, **fields: Any) -> float:
    clock = HostTime()
    with tempfile.TemporaryDirectory() as folder:
        args = stepmark.TrainingArguments(
            output_dir=folder,
            device="xla",
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            learning_rate=1e-4,
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            **fields,
        )
        stepmark.Trainer(make_model(layers), args, train_dataset=Blocks(), callbacks=[clock]).train()
    return clock.median


CONTESTANTS: dict[str, Callable[[int], float]] = {
    BY_HAND: by_hand,
    "torch_xla.compile": partial(by_hand, compiled=True),
    "stepmark": with_stepmark,
    "stepmark, zero_1": partial(with_stepmark, zero_1=True),
}


def measure(layers: int, rounds: int) -> dict[str, list[float]]:
    """Seconds by contestant, one a round."""
    found: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for index in range(rounds):
        for name, contestant in CONTESTANTS.items():
            found[name].append(apart(partial(contestant, layers)))
        shown = "  ".join(f"{name} {seconds[-1] * 1000:.0f}" for name, seconds in found.items())
        print(f"{layers} layers, round {index + 1}: {shown}", flush=True)
    return found


def ratio(found: dict[str, list[float]], name: str) -> float:
    """The median over the rounds of the time beside the loop by hand."""
    return statistics.median(ours / theirs for ours, theirs in zip(found[name], found[BY_HAND], strict=True))


def report(found: dict[int, dict[str, list[float]]]) -> str:
    lines = [machine(), f"GPT-2 of width {WIDTH}, batch {BATCH} x {LENGTH} tokens, steps {WARM_UP + 1} to {STEPS}", ""]
    lines += ["| layers | | host, ms a step | beside a loop by hand |", "| --- | --- | --- | --- |"]
    for layers, contestants in found.items():
        for name, seconds in contestants.items():
            milliseconds = statistics.median(seconds) * 1000
            lines.append(f"| {layers} | {name} | {milliseconds:.0f} | {ratio(contestants, name):.2f} |")
    lines.append("")
    for layers, contestants in found.items():
        beside = ratio(contestants, "stepmark")
        verdict = "holds" if beside <= BAR else "MISSED"
        lines.append(f"- {verdict}: {layers} layers, beside a loop by hand (at most {BAR}): {beside:.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 48])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="append the numbers to results/lazy_host_time.csv")
    options = parser.parse_args()
    found = {layers: measure(layers, options.rounds) for layers in options.layers}
    table = report(found)
    print(f"\n{table}")
    if options.save:
        keep("lazy_host_time", "", table)


if __name__ == "__main__":
    main()
