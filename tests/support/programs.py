"""Programs for ranks: small training runs that return plain values."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import xxhash
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

from stepmark import Trainer, TrainingArguments
from stepmark.liveness import late_rank
from stepmark.liveness.late_rank import Beat
from stepmark.liveness.progress import Progress
from stepmark.sharding.dtensor import local_of
from stepmark.trainer.run_folder.run_log import read_metrics

VOCABULARY, LENGTH = 67, 16


class Blocks(torch.utils.data.Dataset):
    """Random tokens of one length; with `ragged`, some labels are ignored."""

    def __init__(self, samples: int, seed: int = 0, ragged: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)
        self.labels = self.tokens.clone()
        if ragged:
            for index in range(0, samples, 3):
                self.labels[index, LENGTH - 1 - index % 7 :] = -100

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


Sample = dict[str, torch.Tensor]


def drawn(sample: Sample) -> Sample:
    """The sample with three tokens, one drawn from each global generator."""
    tokens = [int(VOCABULARY * draw) for draw in (torch.rand(()).item(), random.random(), np.random.rand())]
    ids = torch.cat([torch.tensor(tokens), sample["input_ids"][3:]])
    return {"input_ids": ids, "labels": ids}


class Augmented(Blocks):
    def __getitem__(self, index: int) -> Sample:
        return drawn(super().__getitem__(index))


class AugmentedStream(torch.utils.data.IterableDataset[Sample]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Sample]:
        return map(drawn, (Blocks(self.samples)[index] for index in range(self.samples)))


class GivesLoader(Trainer):
    """Returns PyTorch's loader."""

    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.train_dataset, self.args.per_device_train_batch_size, shuffle=True)


def tiny_model(dropout: float = 0.1, seed: int | None = 0, layers: int = 1) -> GPT2LMHeadModel:
    if seed is not None:
        torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=layers,
            n_embd=32,
            n_head=2,
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
        )
    )


class KillAt(TrainerCallback):
    """Ends the process with SIGKILL at the end of a step, before the step's log, evaluation and save."""

    def __init__(self, step: int, ranks: list[int] | None) -> None:
        self.step = step
        self.ranks = ranks

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        rank = int(os.environ.get("RANK", "0"))
        if state.global_step == self.step and (self.ranks is None or rank in self.ranks):
            os.kill(os.getpid(), signal.SIGKILL)


class StopsAt(TrainerCallback):
    """Ends the run after a step."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


class SignalAt(TrainerCallback):
    """Sends signals to this process at an event, once `step` steps are done, and then blocks for `block` seconds."""

    def __init__(
        self, event: str, step: int, ranks: list[int], numbers: Sequence[int] = (signal.SIGTERM,), block: float = 0.0
    ) -> None:
        self.step, self.ranks, self.numbers, self.block = step, ranks, numbers, block
        setattr(self, event, self.send)

    def send(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step and int(os.environ.get("RANK", "0")) in self.ranks:
            for number in self.numbers:
                os.kill(os.getpid(), number)
            time.sleep(self.block)


class KillAtEvent(TrainerCallback):
    """Ends the process with SIGKILL at the first event of a name."""

    def __init__(self, event: str) -> None:
        setattr(self, event, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))


class CountGraphs(TrainerCallback):
    """Counters and learning rates after each step, read after the device is drained."""

    def __init__(self) -> None:
        self.graphs: list[list[int]] = []
        self.rates: list[float] = []
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        self.graphs.append(counters(self.trainer) or [])
        self.rates.append(known["lr_scheduler"].get_last_lr()[0])


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Trains the tiny model and returns its losses, weights and counters. `options` are TrainingArguments and samples,
    data ("list", or "workers" that read it; "drawn" from global generators, also as a "stream", or by a "loader" of
    PyTorch's), eval_samples, eval_sets (the names of several), ragged, dropout, layers, model_seed (a list: one a
    rank), kill_at, kill_ranks, kill_at_event, signal_at (what SignalAt is made with), noise (draw random numbers from
    every generator between steps), counted (count graphs after every step), observed (heartbeats all the time)."""
    options = dict(options)
    samples, eval_samples = options.pop("samples", 30), options.pop("eval_samples", 7)
    eval_sets, data = options.pop("eval_sets", None), options.pop("data", "list")
    dropout, kill_at = options.pop("dropout", 0.1), options.pop("kill_at", None)
    layers = options.pop("layers", 1)
    model_seeds, kill_ranks = options.pop("model_seed", [0]), options.pop("kill_ranks", None)
    callbacks = [] if kill_at is None else [KillAt(kill_at, kill_ranks)]
    if options.pop("noise", False):
        callbacks.append(DrawRandomNumbers())
    if "kill_at_event" in options:
        callbacks.append(KillAtEvent(options.pop("kill_at_event")))
    if "signal_at" in options:
        callbacks.append(SignalAt(**options.pop("signal_at")))
    observed = options.pop("observed", False)
    count = CountGraphs()
    if options.pop("counted", False):
        callbacks.append(count)
    ragged = options.pop("ragged", True)
    rank = int(os.environ.get("RANK", "0"))
    defaults = {"max_steps": 8, "per_device_train_batch_size": 2, "logging_steps": 1, "learning_rate": 1e-3}
    defaults |= {"save_strategy": "no", "disable_tqdm": True, "dataloader_num_workers": 2 * (data == "workers")}
    args = TrainingArguments(**{**defaults, **options})
    makers: dict[str, Any] = {"drawn": Augmented, "stream": AugmentedStream, "loader": Augmented}
    trainer = (GivesLoader if data == "loader" else Trainer)(
        tiny_model(dropout, model_seeds[rank % len(model_seeds)], layers),
        args,
        train_dataset=makers[data](samples) if data in makers else Blocks(samples, ragged=ragged),
        eval_dataset=Blocks(eval_samples, seed=1)
        if eval_sets is None
        else {name: Blocks(eval_samples, seed=seed) for seed, name in enumerate(eval_sets, start=1)},
        callbacks=callbacks,
    )
    count.trainer = trainer
    with observing() if observed else nullcontext():
        trainer.train()
    return {
        **logged(Path(args.output_dir)),
        "weights": checksum(trainer),
        "counters": counters(trainer),
        "graphs": count.graphs,
        "rates": count.rates,
        "weighted": weighted_losses(trainer) if data == "list" else [],
    }


@contextmanager
def observing() -> Iterator[None]:
    """Inside the block, another thread looks where this one is all the time, on a processor that is busy elsewhere."""
    at, done = Progress(), threading.Event()

    def look() -> None:
        while not done.wait(0.001):
            Beat.of(0, "", at)

    def delayed(found: Any) -> str:
        time.sleep(0.02)
        return late_rank.stack(found)[-1]

    thread = threading.Thread(target=look)
    with mock.patch.object(late_rank, "innermost", delayed):
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def train_each(*runs: dict[str, Any]) -> list[dict[str, Any]]:
    """Several runs of `train`, one after another: ranks are started once for all of them."""
    return [train(options) for options in runs]


def weighted_losses(trainer: Trainer) -> list[list[float]]:
    """Loss and target tokens of every step, where every step was logged."""
    loader = trainer._loaders.train_batches(trainer.train_dataset).loader
    tokens: list[int] = []
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    while len(tokens) < len(losses):
        tokens += [sum(micro_batch.targets or 0 for micro_batch in batch) for batch in loader]
    local = tokens[: len(losses)]
    totals = [sum(each) for each in zip(*trainer.context.host.all_gather(local), strict=True)]
    return [list(pair) for pair in zip(losses, totals, strict=True)]


class DrawRandomNumbers(TrainerCallback):
    """A user's callback that draws from every global generator."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        torch.rand(3)
        np.random.rand(2)
        random.random()


def logged(folder: Path) -> dict[str, Any]:
    """The last training log and evaluation of each step: those of a resumed run replace the earlier ones."""
    lines = read_metrics(folder)
    return {
        "losses": {line["step"]: [line["loss"], line["grad_norm"]] for line in lines if "loss" in line},
        "evaluations": {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line},
        "resumed": [line["resumed"] for line in lines if "resumed" in line],
    }


def checksum(trainer: Trainer) -> str:
    """Of every bit of the weights, or of this rank's shards."""
    hashed = xxhash.xxh3_128()
    for tensor in trainer.context.runtime.to_host([*map(local_of, trainer.model.state_dict().values())]):
        hashed.update(np.asarray(tensor.contiguous().reshape(-1).view(torch.uint8)))
    return hashed.hexdigest()


def counters(trainer: Trainer) -> list[int] | None:
    found = trainer.context.runtime.counters()
    return None if found is None else [found.compilations, found.executions]
