"""Steps per second of Stepmark's Trainer beside a loop written by hand and transformers' Trainer.

    .venv-newest/bin/python benchmarks/train_overhead.py --device cpu --models gpt2 llama bert t5
    .venv-newest/bin/python benchmarks/train_overhead.py --device cpu --nproc 2 --models gpt2 llama bert t5
    .venv/bin/python benchmarks/train_overhead.py --device xla --models gpt2 llama bert t5

(transformers' Trainer does not train on a CPU where torch_xla is installed, so the CPU is measured without it. Several
ranks are of a CPU: processes on torch_xla's CPU client have no collectives for the others to use.)

The same model (small, so that overhead shows: a GPT-2, a Llama, a BERT that classifies sentences, a T5), data, batch
size, AdamW, schedule and clipping for all three; several ranks of a loop by hand have DistributedDataParallel. They run
in turn, round after round, each time beginning with another one; each run is timed from its fourth step to its last,
with the device drained, and the ranks together, at both ends. Printed are medians: of the steps per second, of their
ratios within a round, and of the ratios of the processor seconds that a step takes, which depend less on what else the
machine does.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_NUM_THREADS", "1" if "--nproc" in sys.argv else "2")
os.environ.setdefault("PJRT_DEVICE", "CPU")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402
from keeping import keep  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
)

import stepmark  # noqa: E402
from stepmark.launch.supervisor import supervise  # noqa: E402

WARM_UP = 4
VOCABULARY, LENGTH = 512, 128


class Blocks(torch.utils.data.Dataset):
    """Random tokens; their labels are the tokens themselves, or with `classes` one class of each sample."""

    def __init__(self, samples: int, classes: int = 0) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(2, VOCABULARY, (samples, LENGTH), generator=generator)
        self.labels = torch.randint(0, classes, (samples,), generator=generator) if classes else self.tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def make_data(options: argparse.Namespace) -> Blocks:
    samples = options.batch * options.steps * options.nproc
    return Blocks(samples, classes=2 if options.model == "bert" else 0)


def make_model(options: argparse.Namespace) -> torch.nn.Module:
    torch.manual_seed(0)
    layers, width, heads = options.layers, options.width, 4
    special = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    sizes |= {"intermediate_size": 4 * width, "max_position_embeddings": LENGTH}
    if options.model == "gpt2":
        special.pop("pad_token_id")
        return GPT2LMHeadModel(GPT2Config(n_positions=LENGTH, n_layer=layers, n_embd=width, n_head=heads, **special))
    if options.model == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes, **special))
    if options.model == "bert":
        return BertForSequenceClassification(BertConfig(**sizes, **special))
    layers = max(1, layers // 2)  # of the encoder and of the decoder
    size = {"d_model": width, "d_kv": width // heads, "d_ff": 4 * width, "num_heads": heads, "num_layers": layers}
    return T5ForConditionalGeneration(T5Config(**{**size, **special, "decoder_start_token_id": 0}))


class Clock(TrainerCallback):
    """Steps per second, and processor seconds a step, between the end of the warm-up and the last step."""

    def __init__(self, steps: int, drain: Callable[[], None]) -> None:
        self.steps = steps
        self.drain = drain
        self.seen = 0
        self.speed = self.processor = 0.0

    def tick(self) -> None:
        self.seen += 1
        if self.seen == WARM_UP:
            self.drain()
            self.started, self.used = time.perf_counter(), time.process_time()
        elif self.seen == self.steps:
            self.drain()
            steps = self.steps - WARM_UP
            self.speed = steps / (time.perf_counter() - self.started)
            self.processor = (time.process_time() - self.used) / steps

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.tick()


def by_hand(device: torch.device, options: argparse.Namespace, clock: Clock) -> None:
    model: Any = make_model(options).to(device)
    model.tie_weights()
    if options.nproc > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    fused = device.type in ("cpu", "cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused or None)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (options.steps + 1))
    data = make_data(options)
    sampler: Any = torch.utils.data.distributed.DistributedSampler(data) if options.nproc > 1 else None
    loader: Any = torch.utils.data.DataLoader(data, options.batch, shuffle=sampler is None, sampler=sampler)
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
    with common_folder() as folder:
        args = stepmark.TrainingArguments(device=device.type, disable_tqdm=True, **common(options, folder))
        data = make_data(options)
        stepmark.Trainer(make_model(options), args, train_dataset=data, callbacks=[clock]).train()


def with_transformers(device: torch.device, options: argparse.Namespace, clock: Clock) -> None:
    with common_folder() as folder:
        args = transformers.TrainingArguments(
            use_cpu=device.type == "cpu",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            ddp_backend="gloo" if options.nproc > 1 else None,
            optim="adamw_torch" if device.type == "xla" else "adamw_torch_fused",  # it refuses fused on XLA
            **common(options, folder),
        )
        data = make_data(options)
        trainer = transformers.Trainer(make_model(options), args, train_dataset=data, callbacks=[clock])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()


@contextmanager
def common_folder() -> Iterator[str]:
    """A folder for a run of all ranks."""
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        if dist.is_initialized():
            dist.broadcast_object_list(folders)
        yield folders[0]
        if dist.is_initialized():
            dist.barrier()


def common(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": options.steps,
        "per_device_train_batch_size": options.batch,
        "learning_rate": 1e-4,
        "save_strategy": "no",
        "logging_strategy": "no",
    }


def open_device(name: str, nproc: int) -> tuple[torch.device, Callable[[], Any]]:
    """The device, and what waits until it, and every other rank, has nothing left to do."""
    if nproc > 1:
        stepmark.Mesh.create(device=name)
        return torch.device(name), dist.barrier
    if name == "xla":
        import torch_xla
        import torch_xla.core.xla_model as xm

        return torch_xla.device(), xm.wait_device_ops
    device = torch.device(name)
    return device, (lambda: None) if name == "cpu" else torch.cuda.synchronize


def measure(options: argparse.Namespace, device: torch.device, drain: Callable[[], Any]) -> dict[str, list[Clock]]:
    runners = {"by hand": by_hand, "stepmark": with_stepmark, "transformers": with_transformers}
    found: dict[str, list[Clock]] = {name: [] for name in runners}
    for index in range(options.rounds + 1):
        names = list(runners)
        for name in names[index % 3 :] + names[: index % 3]:
            clock = Clock(options.steps, drain)
            try:
                runners[name](device, options, clock)
            except Exception as error:
                print(f"{name} cannot train here: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
            if index and clock.speed:  # the first round compiles and warms caches
                found[name].append(clock)
        shown = "  ".join(f"{name} {each[-1].speed:.2f}" for name, each in found.items() if each)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"{options.model}, round {index}: {shown}", flush=True)
    return found


def heading(options: argparse.Namespace) -> list[str]:
    ranks = f" on {options.nproc} ranks" if options.nproc > 1 else ""
    return [
        f"device {options.device}{ranks}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{os.cpu_count()} cores {platform.machine()}, {time.strftime('%Y-%m-%d')}",
        f"{options.layers} layers, width {options.width}, batch {options.batch} x {LENGTH} tokens, {options.rounds} "
        f"rounds of {options.steps} steps",
        "",
        "| | | steps/s | beside a loop by hand | its processor seconds a step by these |",
        "| --- | --- | --- | --- | --- |",
    ]


def rows(model: str, found: dict[str, list[Clock]]) -> list[str]:
    lines = []
    for name, each in found.items():
        if each:
            pairs = list(zip(each, found["by hand"], strict=True))
            speed = statistics.median(clock.speed for clock in each)
            ratio = statistics.median(clock.speed / hand.speed for clock, hand in pairs)
            processor = statistics.median(hand.processor / clock.processor for clock, hand in pairs)
            lines.append(f"| {model} | {name} | {speed:.2f} | {ratio:.3f} | {processor:.3f} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "xla", "cuda"])
    parser.add_argument("--nproc", type=int, default=1, help="ranks, on a CPU")
    parser.add_argument("--models", nargs="+", default=["gpt2"], choices=["gpt2", "llama", "bert", "t5"])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--save", action="store_true", help="append the numbers to results/train_overhead.csv")
    options = parser.parse_args()
    if options.nproc > 1 and options.device != "cpu":
        parser.error("--nproc: several ranks are compared on a CPU only")
    if options.nproc > 1 and "RANK" not in os.environ:
        return supervise([sys.executable, *sys.argv], options.nproc)
    device, drain = open_device(options.device, options.nproc)
    lines = heading(options)
    for model in options.models:
        options.model = model
        lines += rows(model, measure(options, device, drain))
    if dist.is_initialized() and dist.get_rank() != 0:
        return 0
    table = "\n".join(lines)
    print(f"\n{table}")
    if options.save:
        ranks = f", {options.nproc} ranks" if options.nproc > 1 else ""
        keep("train_overhead", f"{options.device}{ranks}", table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
