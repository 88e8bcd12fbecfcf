"""What ranks run in tests: small real training runs, told by plain values."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

from stepmark import Trainer, TrainingArguments
from stepmark.trainer.journal import read_metrics

VOCABULARY, LENGTH = 67, 16


class Blocks(torch.utils.data.Dataset):
    """Random tokens of one length; with `ragged`, some of the labels do not count."""

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


def tiny_model(dropout: float = 0.1, seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=2,
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
    """Ends the process with SIGKILL at the end of a step: after `before_save` nothing more is written."""

    def __init__(self, step: int, ranks: list[int] | None) -> None:
        self.step = step
        self.ranks = ranks

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        rank = int(os.environ.get("RANK", "0"))
        if state.global_step == self.step and (self.ranks is None or rank in self.ranks):
            os.kill(os.getpid(), signal.SIGKILL)


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Trains the tiny model and tells what happened. `options` are TrainingArguments and, beside them: samples,
    eval_samples, dropout, model_seed (a list: one a rank), kill_at, kill_ranks, noise (draw random numbers from every
    generator between steps)."""
    options = dict(options)
    samples, eval_samples = options.pop("samples", 30), options.pop("eval_samples", 7)
    dropout, kill_at = options.pop("dropout", 0.1), options.pop("kill_at", None)
    model_seeds, kill_ranks = options.pop("model_seed", [0]), options.pop("kill_ranks", None)
    callbacks = [] if kill_at is None else [KillAt(kill_at, kill_ranks)]
    if options.pop("noise", False):
        callbacks.append(DrawRandomNumbers())
    rank = int(os.environ.get("RANK", "0"))
    defaults = {"max_steps": 8, "per_device_train_batch_size": 2, "logging_steps": 1, "learning_rate": 1e-3}
    args = TrainingArguments(**{**defaults, "save_strategy": "no", "disable_tqdm": True, **options})
    trainer = Trainer(
        tiny_model(dropout, model_seeds[rank % len(model_seeds)]),
        args,
        train_dataset=Blocks(samples),
        eval_dataset=Blocks(eval_samples, seed=1),
        callbacks=callbacks,
    )
    trainer.train()
    return {**logged(Path(args.output_dir)), "weights": digest(trainer), "counters": counters(trainer)}


class DrawRandomNumbers(TrainerCallback):
    """A user's callback that draws from every global generator."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        torch.rand(3)
        np.random.rand(2)  # noqa: NPY002
        random.random()


def logged(folder: Path) -> dict[str, Any]:
    """The last training log and evaluation of each step, as the contract counts them."""
    lines = read_metrics(folder)
    return {
        "losses": {line["step"]: [line["loss"], line["grad_norm"]] for line in lines if "loss" in line},
        "evaluations": {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line},
        "resumed": [line["resumed"] for line in lines if "resumed" in line],
    }


def digest(trainer: Trainer) -> str:
    """Of all weights, bit for bit."""
    hashed = xxhash.xxh3_128()
    for tensor in trainer.context.runtime.to_host(list(trainer.model.state_dict().values())):
        hashed.update(np.asarray(tensor.contiguous().reshape(-1).view(torch.uint8)))
    return hashed.hexdigest()


def counters(trainer: Trainer) -> list[int] | None:
    found = trainer.context.runtime.counters()
    return None if found is None else [found.compilations, found.executions]
