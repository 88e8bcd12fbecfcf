"""What Stepmark costs on a GPU, in at most four minutes, with the packages that are there and no network.

    python benchmarks/gpu.py --save
    PYTHONPATH=src:/wheels python3 benchmarks/gpu.py --only steps saves    # where Stepmark is not installed
    .venv-newest/bin/python benchmarks/gpu.py --device cpu --small         # a trial of the program without a GPU

- steps: tokens a second of a loop by hand, transformers' Trainer and Stepmark's, and the memory of the device at most.
- compile: the same with `torch_compile`, and the seconds of a first step with an empty cache and with that cache.
- saves: how long training waits for the first save of a `Checkpointer` and for later ones, what 40 steps beside them
  lose, when they are durable, and a restore with the page cache dropped; the same of torch.save, and of DCP's
  async_save with its stager.
- stager: whether DCP's stager copies what was there before an update that is queued behind it.

A line of a table is measured in a process of its own, so that it shares memory with nothing; contestants of steps take
turns there. Lines for which there is no time are named. --save appends the numbers to results/gpu.csv, with the card.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
import transformers  # noqa: E402
from keeping import keep, machine  # noqa: E402
from page_cache import drop_cache  # noqa: E402
from torch import nn  # noqa: E402

import stepmark  # noqa: E402

VOCABULARY, WARM_UP, BESIDE = 32_000, 6, 40
HAND, THEIRS, OURS = "by hand", "transformers", "stepmark"
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """`rows` of `length` tokens are a batch. `seconds`: what two rounds of the three take at most on an H200."""

    model: str
    sizes: dict[str, int]
    bf16: bool
    rows: int
    length: int
    steps: int
    seconds: float
    small: dict[str, int] = field(default_factory=lambda: _sizes(64, 128, 2, 4, 2))


def _sizes(width: int, inner: int, layers: int, heads: int, groups: int, **more: int) -> dict[str, int]:
    own = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**own, "num_key_value_heads": groups, "max_position_embeddings": 2048, **more}


MIXTRAL = _sizes(512, 1024, 8, 8, 4, num_local_experts=16, num_experts_per_tok=2)
QWEN = _sizes(512, 1024, 8, 8, 4, num_experts=64, num_experts_per_tok=8, moe_intermediate_size=256, head_dim=64)
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 2}
CASES = {
    "GPT-2 small, fp32": Case("GPT2LMHeadModel", {}, False, 8, 128, 40, 20, GPT2),
    "Llama 134 M, bf16": Case("LlamaForCausalLM", _sizes(768, 2048, 12, 12, 12), True, 8, 1024, 36, 25),
    "Mixtral 240 M, bf16": Case("MixtralForCausalLM", MIXTRAL, True, 8, 512, 26, 30),
    "BERT base, fp32": Case("BertForSequenceClassification", {}, False, 8, 128, 40, 20),
    "Qwen3-MoE 240 M, bf16": Case("Qwen3MoeForCausalLM", QWEN, True, 8, 512, 26, 40),
    "Llama 1.1 B, bf16": Case("LlamaForCausalLM", _sizes(2048, 5632, 22, 32, 4), True, 4, 2048, 20, 45),
}
COMPILED = "Llama 134 M, bf16"


class Tokens(torch.utils.data.Dataset):
    def __init__(self, rows: int, length: int, *, classes: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(2, VOCABULARY, (rows, length), generator=generator)
        self.labels = torch.randint(0, 2, (rows,), generator=generator) if classes else self.tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


class Clock(transformers.TrainerCallback):
    """Steps a second behind the warm-up, and the seconds of the first step, with the device drained."""

    def __init__(self, run: Run) -> None:
        self._run, self._seen = run, 0
        self.speed = self.first = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self._seen == 0:
            self._run.drain()
            self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._seen += 1
        if self._seen in (1, WARM_UP, self._run.steps):
            self._run.drain()
            now = time.perf_counter()
            if self._seen == 1:
                self.first = now - self._began
            elif self._seen == WARM_UP:
                self._warm = now
            else:
                self.speed = (self._run.steps - WARM_UP) / (now - self._warm)


class Run:
    """One line of a table, in this process."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device, self.small = torch.device(options.device), options.small
        self.drain: Callable[[], None] = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        self.steps = 0

    # Steps

    def compare(self, name: str, *, compiled: bool) -> dict[str, list[float]]:
        """By contestant: tokens a second, beside a loop by hand, and GiB at most."""
        speeds: dict[str, list[float]] = {HAND: [], THEIRS: [], OURS: []}
        peaks = dict.fromkeys(speeds, 0.0)
        case = CASES[name]
        for turn in range(2):
            for each in [*speeds][turn:] + [*speeds][:turn]:
                gc.collect()
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                speeds[each].append(self.train(name, each, case.steps, compiled=compiled).speed)
                if self.device.type == "cuda":
                    peaks[each] = torch.cuda.max_memory_allocated() / GIB
        tokens = case.rows * case.length
        beside = {each: [own / hand for own, hand in zip(speeds[each], speeds[HAND], strict=True)] for each in speeds}
        median = statistics.median
        return {each: [tokens * median(speeds[each]), median(beside[each]), peaks[each]] for each in speeds}

    def train(self, name: str, contestant: str, steps: int, *, compiled: bool) -> Clock:
        case, self.steps = CASES[name], WARM_UP + 4 if self.small else steps
        clock = Clock(self)
        kind = getattr(transformers, case.model)
        sizes = {**case.sizes, **case.small} if self.small else case.sizes
        if self.small and "head_dim" in sizes:
            sizes["head_dim"] = 16
        torch.manual_seed(0)
        if "GPT2" not in case.model:
            sizes = {"vocab_size": VOCABULARY, **sizes}
        with self.device:
            model = kind(kind.config_class(**sizes))
        length = min(case.length, 64) if self.small else case.length
        data = Tokens(case.rows * self.steps, length, classes=case.model.startswith("Bert"))
        with tempfile.TemporaryDirectory() as folder:
            common: dict[str, Any] = {
                "output_dir": folder,
                "max_steps": self.steps,
                "per_device_train_batch_size": case.rows,
                "learning_rate": 1e-4,
                "save_strategy": "no",
                "logging_strategy": "no",
                "report_to": "none",
                "disable_tqdm": True,
                "bf16": case.bf16,
                "torch_compile": compiled,
            }
            if contestant == HAND:
                self._by_hand(model.train(), data, case, clock, compiled=compiled)
            elif contestant == THEIRS:
                common |= {"optim": "adamw_torch_fused", "use_cpu": self.device.type == "cpu"}
                args = transformers.TrainingArguments(**common)
                trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=[clock])
                trainer.remove_callback(transformers.PrinterCallback)
                trainer.train()
            else:
                own = stepmark.TrainingArguments(**common, device=self.device.type)
                stepmark.Trainer(model, own, train_dataset=data, callbacks=[clock]).train()
        return clock

    def _by_hand(self, model: Any, data: Tokens, case: Case, clock: Clock, *, compiled: bool) -> None:
        called: Any = torch.compile(model) if compiled else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        cuda = self.device.type == "cuda"
        more = {} if case.model.startswith("Bert") else {"use_cache": False}
        for batch in torch.utils.data.DataLoader(data, case.rows, shuffle=True, pin_memory=cuda):
            clock.on_step_begin()
            inputs = {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}
            with torch.autocast(self.device.type, torch.bfloat16, enabled=case.bf16):
                loss = called(**inputs, **more).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            clock.on_step_end()

    # Saves

    def save(self, contestant: str, gib: float) -> list[float]:
        """Seconds: the first call and later ones, what the steps beside them lost, durable, restored. Raises
        AssertionError where what was restored is not what was saved."""
        width = 256 if self.small else 2048
        layers = max(2, int(gib * GIB / 12 / width**2))  # with the two states of AdamW
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)]).to(self.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        inputs = torch.randn(width, width, device=self.device)

        def steps(count: int) -> float:
            began = time.perf_counter()
            for _ in range(count):
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                    output = model(inputs)
                output.float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            self.drain()
            return time.perf_counter() - began

        steps(5)
        beside = 4 if self.small else BESIDE
        alone = statistics.median(steps(beside) for _ in range(3))
        calls, lost, durable = [], [], []
        with tempfile.TemporaryDirectory() as folder:
            save, restore = {OURS: _stepmark, "DCP, stager": _dcp, "torch.save": _torch}[contestant](
                Path(folder), model, optimizer, self.device
            )
            for index in range(3):
                kept = [each.detach().cpu().clone() for each in _tensors(model, optimizer)] if index == 2 else []
                self.drain()
                began = time.perf_counter()
                wait = save(index)
                calls.append(time.perf_counter() - began)
                steps(beside)
                lost.append(time.perf_counter() - began - alone)
                wait()
                durable.append(time.perf_counter() - began)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
            drop_cache(Path(folder))
            self.drain()
            began = time.perf_counter()
            restore(2)
            self.drain()
            restored = time.perf_counter() - began
            equal = [torch.equal(one, other.cpu()) for one, other in zip(kept, _tensors(model, optimizer), strict=True)]
            assert all(equal), f"{contestant}: {equal.count(False)} of {len(equal)} tensors are not as they were saved"
        return [calls[0], max(calls[1:]), lost[0], max(lost[1:]), max(durable), restored]

    def stage(self) -> int:
        """How many of 20 copies of DCP's stager are not of the step that they were taken at."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        weights = torch.zeros(1 << (16 if self.small else 26), device=self.device)
        busy = torch.randn(*(2 * [64 if self.small else 8192]), device=self.device, dtype=torch.bfloat16)
        cuda = self.device.type == "cuda"
        stager = DefaultStager(StagingOptions(cuda, False, True, cuda))
        stager.stage({"weights": weights}).result()
        wrong = 0
        for step in range(1, 21):
            for _ in range(40):
                busy @ busy  # a backward pass that is still queued
            weights.add_(1)  # the update behind it
            staged = stager.stage({"weights": weights}).result()["weights"]
            wrong += (staged[0].item(), staged[-1].item()) != (step, step)
            self.drain()
        return wrong


Saves = tuple[Callable[[int], Callable[[], Any]], Callable[[int], Any]]


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [each for state in optimizer.state.values() for each in state.values() if torch.is_tensor(each)]
    return [*model.parameters(), *states]


def _stepmark(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Saves:
    checkpointer, state = stepmark.Checkpointer(folder, keep_last=1), {"model": model, "optimizer": optimizer}
    return lambda index: checkpointer.save(index, state).result, lambda index: checkpointer.restore(state)


def _dcp(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Saves:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    cuda = device.type == "cuda"
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", init_method=f"file://{folder}/ranks", rank=0, world_size=1
    )
    stager = DefaultStager(StagingOptions(cuda, False, True, cuda))

    def save(index: int) -> Callable[[], Any]:
        weights, states = get_state_dict(model, optimizer)
        got: Any = dcp.async_save({"m": weights, "o": states}, checkpoint_id=folder / f"{index}", async_stager=stager)
        if not hasattr(got, "staging_completion"):
            return got.result
        got.staging_completion.result()  # only then may the parameters change
        return got.upload_completion.result

    def restore(index: int) -> None:
        weights, states = get_state_dict(model, optimizer)
        dcp.load({"m": weights, "o": states}, checkpoint_id=folder / f"{index}")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)

    return save, restore


def _torch(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Saves:
    def save(index: int) -> Callable[[], Any]:
        with (folder / "state.pt").open("wb") as file:
            torch.save([model.state_dict(), optimizer.state_dict()], file)
            file.flush()
            os.fsync(file.fileno())
        return lambda: None

    def restore(index: int) -> None:
        weights, states = torch.load(folder / "state.pt", map_location=device)
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)

    return save, restore


# The tables


class Tables:
    """Asks for lines while there is time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._until = options, time.monotonic() + options.seconds
        self.left_out: list[str] = []
        self.lines: list[str] = []

    def ask(self, seconds: float, *line: str, **environment: str) -> Any:
        """What `measure` returns for a line, in a process of its own; None where that has no time, or has failed."""
        left = self._until - time.monotonic()
        name = " ".join(line)
        if left < seconds:
            self.left_out.append(f"{name} (no time)")
            return None
        command = [sys.executable, __file__, "--device", self._options.device, "--gib", str(self._options.gib)]
        command += [*(["--small"] if self._options.small else []), "--line", *line]
        try:
            done = subprocess.run(
                command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, timeout=left
            )
        except subprocess.TimeoutExpired:
            self.left_out.append(f"{name} (no time)")
            return None
        if done.returncode:
            self.left_out.append(f"{name} (failed)")
            return None
        print(f"{self._options.seconds - self._until + time.monotonic():4.0f} s  {name}", flush=True)
        return json.loads(done.stdout.splitlines()[-1])

    def _table(self, title: str, columns: list[str], rows: list[str]) -> None:
        if rows:
            head = ["", f"## {title}", "", f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
            self.lines += [*head, *rows]

    def steps(self, kind: str, names: list[str]) -> None:
        rows = []
        for name in names:
            for contestant, numbers in (self.ask(CASES[name].seconds, kind, name) or {}).items():
                rows.append(f"| {name} | {contestant} | {numbers[0]:.0f} | {numbers[1]:.3f} | {numbers[2]:.2f} |")
        self._table(kind, ["model", "", "tokens/s", "beside by hand", "GiB"], rows)

    def compiled(self) -> None:
        self.steps("compile", [COMPILED])
        rows = []
        for name in (HAND, THEIRS, OURS):
            with tempfile.TemporaryDirectory() as cache:
                found = [self.ask(25, "first", name, TORCHINDUCTOR_CACHE_DIR=cache) for _ in range(2)]
            if None not in found:
                rows.append(f"| {name} | {found[0]:.1f} | {found[1]:.1f} |")
        self._table("first step", ["", "empty cache, s", "with the cache, s"], rows)

    def saves(self) -> None:
        found = {name: self.ask(25, "save", name) for name in (OURS, "DCP, stager", "torch.save")}
        rows = [
            f"| {name} | " + " | ".join(f"{each:.3f}" for each in numbers) + " |"
            for name, numbers in found.items()
            if numbers
        ]
        columns = ["", "first call, s", "later, s", "40 steps lose, s", "later ones, s", "durable, s", "restored, s"]
        self._table(f"saves of {self._options.gib:g} GiB", columns, rows)

    def stager(self) -> None:
        if (wrong := self.ask(20, "stage")) is not None:
            self.lines += ["", f"- copies of DCP's stager that are of another step, of 20: {wrong}"]


def measure(options: argparse.Namespace) -> Any:
    run, (kind, *which) = Run(options), options.line
    if kind in ("steps", "compile"):
        return run.compare(*which, compiled=kind == "compile")
    if kind == "first":
        return run.train(COMPILED, *which, WARM_UP + 2, compiled=True).first
    return run.stage() if kind == "stage" else run.save(which[0], options.gib)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=235.0, help="for all")
    parser.add_argument("--only", nargs="+", choices=["steps", "compile", "saves", "stager"])
    parser.add_argument("--gib", type=float, default=3.0, help="of a save")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the program")
    parser.add_argument("--save", action="store_true", help="append the numbers to results/gpu.csv")
    parser.add_argument("--line", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --device cpu --small tries the program without one")
    if options.line:
        print(json.dumps(measure(options)))
        return 0
    tables, wanted = Tables(options), options.only or ["steps", "compile", "saves", "stager"]
    work: dict[str, Callable[[], None]] = {
        "saves": tables.saves,
        "steps": lambda: tables.steps("steps", [*CASES]),
        "compile": tables.compiled,
        "stager": tables.stager,
    }
    for name in work:
        if name in wanted:
            work[name]()
    card = torch.cuda.get_device_name() if options.device == "cuda" else "no GPU"
    text = "\n".join([f"{card}, transformers {transformers.__version__}, {machine()}", *tables.lines])
    if tables.left_out:
        text += "\n\nLeft out: " + "; ".join(tables.left_out)
    print(f"\n{text}")
    if options.save:
        keep("gpu", "small" if options.small else "", text)
    return int(any("failed" in each for each in tables.left_out))


if __name__ == "__main__":
    sys.exit(main())
