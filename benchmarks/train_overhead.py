"""Steps per second of Stepmark's Trainer beside a loop written by hand and transformers' Trainer.

    .venv-newest/bin/python benchmarks/train_overhead.py --device cpu
    .venv/bin/python benchmarks/train_overhead.py --device xla

(transformers' Trainer does not train on a CPU where torch_xla is installed, so the CPU is measured without it.)

The same GPT-2 (small, so that overhead shows), data, batch size, AdamW, schedule and clipping for all three, on one
rank. They run in turn, round after round, in one process; each run is timed from its fourth step to its last, with the
device drained at both ends. Printed are medians, and the median of the ratios within a round.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("PJRT_DEVICE", "CPU")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback  # noqa: E402

import stepmark  # noqa: E402

WARM_UP = 4
VOCABULARY, LENGTH = 512, 128


class Blocks(torch.utils.data.Dataset):
    def __init__(self, samples: int) -> None:
        self.tokens = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def make_model(size: dict[str, int]) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, bos_token_id=0, eos_token_id=0, **size)
    return GPT2LMHeadModel(config)


class Clock(TrainerCallback):
    """Steps per second between the end of the warm-up and the last step."""

    def __init__(self, steps: int, drain: Callable[[], None]) -> None:
        self.steps = steps
        self.drain = drain
        self.seen = 0
        self.speed = 0.0

    def tick(self) -> None:
        self.seen += 1
        if self.seen == WARM_UP:
            self.drain()
            self.started = time.perf_counter()
        elif self.seen == self.steps:
            self.drain()
            self.speed = (self.steps - WARM_UP) / (time.perf_counter() - self.started)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.tick()


def by_hand(device: torch.device, options: argparse.Namespace, clock: Clock) -> None:
    model = make_model(options.size).to(device)
    model.tie_weights()
    fused = device.type in ("cpu", "cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused or None)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (options.steps + 1))
    loader: Any = torch.utils.data.DataLoader(Blocks(options.batch * options.steps), options.batch, shuffle=True)
    if device.type == "xla":
        import torch_xla
        from torch_xla.distributed.parallel_loader import MpDeviceLoader

        loader = MpDeviceLoader(loader, device)
    model.train()
    for batch in loader:
        inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        loss = model(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if device.type == "xla":
            torch_xla.sync()
        clock.tick()


def with_stepmark(device: torch.device, options: argparse.Namespace, clock: Clock) -> None:
    with tempfile.TemporaryDirectory() as folder:
        args = stepmark.TrainingArguments(device=device.type, disable_tqdm=True, **common(options, folder))
        data = Blocks(options.batch * options.steps)
        stepmark.Trainer(make_model(options.size), args, train_dataset=data, callbacks=[clock]).train()


def with_transformers(device: torch.device, options: argparse.Namespace, clock: Clock) -> None:
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            use_cpu=device.type == "cpu",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            optim="adamw_torch" if device.type == "xla" else "adamw_torch_fused",  # it refuses fused on XLA
            **common(options, folder),
        )
        data = Blocks(options.batch * options.steps)
        trainer = transformers.Trainer(make_model(options.size), args, train_dataset=data, callbacks=[clock])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()


def common(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": options.steps,
        "per_device_train_batch_size": options.batch,
        "learning_rate": 1e-4,
        "save_strategy": "no",
        "logging_strategy": "no",
    }


def open_device(name: str) -> tuple[torch.device, Callable[[], None]]:
    """The device, and what waits until it has nothing left to do."""
    if name == "xla":
        import torch_xla
        import torch_xla.core.xla_model as xm

        return torch_xla.device(), xm.wait_device_ops
    device = torch.device(name)
    return device, (lambda: None) if name == "cpu" else torch.cuda.synchronize


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    device, drain = open_device(options.device)
    runners = {"by hand": by_hand, "stepmark": with_stepmark, "transformers": with_transformers}
    speeds: dict[str, list[float]] = {name: [] for name in runners}
    for index in range(options.rounds + 1):
        for name, runner in runners.items():
            clock = Clock(options.steps, drain)
            try:
                runner(device, options, clock)
            except Exception as error:
                print(f"{name} cannot train here: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
            if index and clock.speed:  # the first round compiles and warms caches
                speeds[name].append(clock.speed)
        print(f"round {index}: " + "  ".join(f"{name} {each[-1]:.2f}" for name, each in speeds.items() if each))
    return speeds


def report(options: argparse.Namespace, speeds: dict[str, list[float]]) -> str:
    size = " ".join(f"{key}={value}" for key, value in options.size.items())
    lines = [
        f"device {options.device}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{os.cpu_count()} cores {platform.machine()}, {time.strftime('%Y-%m-%d')}",
        f"GPT-2 {size}, batch {options.batch} x {LENGTH} tokens, {options.rounds} rounds of {options.steps} steps",
        "",
        "| | steps/s | beside a loop by hand |",
        "| --- | --- | --- |",
    ]
    for name, each in speeds.items():
        if each:
            ratios = [ours / theirs for ours, theirs in zip(each, speeds["by hand"], strict=True)]
            lines.append(f"| {name} | {statistics.median(each):.2f} | {statistics.median(ratios):.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "xla", "cuda"])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--save", action="store_true", help="keep the table under benchmarks/results")
    options = parser.parse_args()
    options.size = {"n_layer": options.layers, "n_embd": options.width, "n_head": 4}
    table = report(options, measure(options))
    print(f"\n{table}")
    if options.save:
        target = Path(__file__).parent / "results" / f"train_overhead_{options.device}.md"
        target.write_text(table + "\n")


if __name__ == "__main__":
    main()
