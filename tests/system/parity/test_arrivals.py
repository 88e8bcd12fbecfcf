"""ZeRO-1's new values arrive while the next forward pass runs: nobody uses one before it is there."""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import TrainerCallback

from stepmark import Trainer, TrainingArguments
from stepmark.launch.signal_listener import RunInterrupted
from stepmark.parallel import buckets
from stepmark.parallel.optimizer import pending_gathers
from stepmark.parallel.optimizer.pending_gathers import PendingGathers
from stepmark.runtime.collectives import GroupCollectives
from tests.support.full_sharding_programs import t5
from tests.support.gradient_programs import Inner
from tests.support.models import build
from tests.support.ranks import Ranks

EVERY_STEP: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 3}
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("gpt2", {}, ""),
    ("gpt2", EVERY_STEP, ""),
    ("gpt2", {"load_best_model_at_end": True, **EVERY_STEP, "save_steps": 2}, ""),
    ("gpt2", {"gradient_accumulation_steps": 2, "dtype": "bfloat16"}, ""),
    ("gpt2", {}, "on_step_begin"),
    ("gpt2", {}, "on_optimizer_step"),
    ("gpt2", {}, "on_step_end"),
    ("gpt2", {"logging_steps": 3}, "on_log"),
    ("gpt2", {}, "mined"),
    ("gpt2 checkpointed", {}, ""),
    ("llama", {}, ""),
    ("bert", {}, ""),
    ("t5", {}, ""),
    ("own", {}, ""),
    ("own", EVERY_STEP, ""),
    ("kernels", {}, ""),
    ("gpt2", {"save_strategy": "steps", "save_steps": 100}, "stopped"),
    ("functions", {}, ""),
    ("replayed", {}, ""),
    ("torch.func", {}, "unknown"),
    ("own", {}, "unknown"),
]
# Callbacks may use the model, and the user's code do anything with it.
WAITING = ("on_step_begin", "on_optimizer_step", "on_step_end", "stopped", "unknown")
SAMPLE = [CASES[6], CASES[8], CASES[14], CASES[15], CASES[19]]


def check(ranks: Ranks, folder: Path, model: str, options: dict[str, Any], case: str, nproc: int = 2) -> None:
    for plain, found in ranks.run(trained, str(folder), model, options, case, nproc=nproc).check():
        assert found["values"] == plain["values"]
        assert found["weights"] == plain["weights"]
        assert found["read"] == plain["read"]
        assert all(map(math.isfinite, [*found["values"], *found["read"]]))
        assert found["waits"] > len(found["deferred"]), "several buckets a step"
        assert any(found["deferred"]) == (model != "replayed" and case not in WAITING)


@pytest.mark.parametrize(("model", "options", "case"), SAMPLE)
def test_a_run_is_the_same_however_late_values_arrive(
    ranks: Ranks, tmp_path: Path, model: str, options: dict[str, Any], case: str
) -> None:
    check(ranks, tmp_path, model, options, case)


@pytest.mark.prove
@pytest.mark.parametrize("nproc", [2, 3])
@pytest.mark.parametrize(("model", "options", "case"), CASES)
def test_every_run_is_the_same_however_late_values_arrive(
    ranks: Ranks, tmp_path: Path, model: str, options: dict[str, Any], case: str, nproc: int
) -> None:
    check(ranks, tmp_path, model, options, case, nproc)


# What ranks run


WORDS, SAMPLES = 32, 24
Model = Callable[[], nn.Module]


class Base(nn.Module):
    """Its parts use each other's parameters, as some state space models and weight penalties do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 16)
        self.inner = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(16))
        self.lists = nn.ParameterList(nn.Parameter(torch.randn(16, 16) / 4) for _ in range(2))
        self.recurrent = nn.LSTM(16, 16, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, WORDS)

    def mixed(self, hidden: Tensor) -> Tensor:
        hidden = functional.linear(hidden, self.inner.weight, bias=self.inner.bias) * self.scale
        return hidden @ torch.stack(list(self.lists)).sum(0)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        penalty = self.head.weight.norm() + torch.cat([p.flatten() for p in self.recurrent.parameters()]).square().sum()
        hidden = self.mixed(self.table(input_ids))
        hidden = hidden + self.recurrent(hidden)[0]
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        logits = self.head(hidden)
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss + 1e-3 * penalty, "logits": logits}


class Product(torch.autograd.Function):
    """Takes a parameter that belongs to another module."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, 1).t() @ hidden.flatten(0, 1)


class Functions(Base):
    def mixed(self, hidden: Tensor) -> Tensor:
        return Product.apply(hidden, self.inner.weight) + self.inner.bias


class Replay(torch.autograd.Function):
    """Reads a parameter's memory without its name, as a graph that is replayed does."""

    memory: Tensor

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return hidden @ Replay.memory.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradient @ Replay.memory, gradient.flatten(0, 1).t() @ ctx.saved_tensors[0].flatten(0, 1)


class Replayed(Base):
    def mixed(self, hidden: Tensor) -> Tensor:
        return Replay.apply(hidden, self.inner.weight)


class Kernel(nn.Linear):
    """Its own weight is read by something that is not a function of torch."""

    def forward(self, hidden: Tensor) -> Tensor:
        return Replay.apply(hidden, self.weight)


class Kernels(Base):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Kernel(16, 16, bias=False)

    def mixed(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden) * self.scale @ torch.stack(list(self.lists)).sum(0)


class Recorder(TrainerCallback):
    """Remembers where the weight is, before the first step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **known: Any) -> None:
        Replay.memory = model.inner.weight.detach()


class Stopper(TrainerCallback):
    """Asks the run to stop after its seventh step, as a scheduler does."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        if state.global_step == 6:
            signal.raise_signal(signal.SIGTERM)


def _gpt2_checkpointed() -> nn.Module:
    model: Any = build("gpt2")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    return model


MODELS: dict[str, Model] = {
    "gpt2": partial(build, "gpt2"),
    "gpt2 checkpointed": _gpt2_checkpointed,
    "llama": partial(build, "llama", tie_word_embeddings=True),
    "bert": partial(build, "bert"),
    "t5": t5,
    "own": Base,
    "functions": Functions,
    "replayed": Replayed,
    "kernels": Kernels,
    "torch.func": Inner,
}


class Reader(TrainerCallback):
    """Reads the model at some event."""

    def __init__(self, event: str) -> None:
        self.sums: list[float] = []

        def read(args: Any, state: Any, control: Any, model: nn.Module, **known: Any) -> None:
            values = [parameter.detach().numpy().sum() for parameter in model.parameters()]
            self.sums.append(float(sum(values)))

        setattr(self, event, read)


class MinedSamples(torch.utils.data.Dataset[Any]):
    """Samples that the model chooses while it is trained, by one of its tables."""

    def __init__(self, model: Any, rows: list[dict[str, Any]]) -> None:
        self.model, self.rows = model, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        preferred = int(self.model.transformer.wte.weight.detach().sum(1).argmax())
        return {**self.rows[index], "labels": self.rows[(index + preferred) % len(self.rows)]["labels"]}


def _late(arrived: list[int]) -> Callable[[GroupCollectives, Tensor], Callable[[], Tensor]]:
    """`start_gather_in_place` as on a network that is so slow that nothing is there until it is waited for."""
    original = GroupCollectives.start_gather_in_place

    def start(axis: GroupCollectives, tensor: Tensor) -> Callable[[], Tensor]:
        finish = original(axis, tensor.clone())
        own = axis.own_shard(tensor).clone()
        tensor.fill_(torch.nan)
        axis.own_shard(tensor).copy_(own)

        def wait() -> Tensor:
            arrived.append(0)
            return tensor.copy_(finish())

        return wait

    return start


def _rows() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, WORDS, (SAMPLES, 10), generator=generator)
    return [{"input_ids": each, "labels": each} for each in tokens]


def trained(*arguments: Any) -> list[dict[str, Any]]:
    """A run whose values arrive soon, and the same with late ones."""
    return [train(*arguments, late) for late in (False, True)]


def train(folder: str, model: str, options: dict[str, Any], case: str, late: bool) -> dict[str, Any]:
    """What a run has logged, what a callback has read, and whether steps ended before their values were there."""
    arrived: list[int] = []
    deferred: list[bool] = []
    buckets.HOST_BUCKET_ELEMENTS = 400
    if case != "unknown":
        pending_gathers.LIBRARIES |= {"tests"}
    if late:
        GroupCollectives.start_gather_in_place = _late(arrived)  # type: ignore[method-assign]
        first_use = PendingGathers.first_use

        def used(self: PendingGathers) -> Any:
            deferred.append(bool(self._pending))
            return first_use(self)

        PendingGathers.first_use = used  # type: ignore[method-assign]
    torch.manual_seed(0)
    made, rows = MODELS[model](), _rows()
    reader = Reader(case if case.startswith("on_") else "on_train_end")
    args = TrainingArguments(
        output_dir=str(Path(folder) / ("late" if late else "plain")),
        device="cpu",
        zero_1=True,
        num_train_epochs=2,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        learning_rate=1e-2,
        disable_tqdm=True,
        **{"save_strategy": "no", "logging_steps": 5, **options},
    )
    samples: Any = MinedSamples(made, rows) if case == "mined" else rows
    callbacks: list[Any] = [reader] if case.startswith("on_") else []
    callbacks += [Recorder()] if model in ("replayed", "kernels") else []
    callbacks += [Stopper()] if case == "stopped" else []
    trainer = Trainer(made, args, train_dataset=samples, eval_dataset=rows, callbacks=callbacks)
    with contextlib.suppress(RunInterrupted):
        trainer.train()
    history = trainer.state.log_history
    values = [log.get("loss", log.get("eval_loss")) for log in history if "loss" in log or "eval_loss" in log]
    tensors = [parameter.detach() for parameter in made.parameters()]
    if case == "stopped":
        tensors = list(load_file(Path(args.output_dir) / "checkpoint-7" / "model.safetensors").values())
    weights = [float(tensor.double().sum()) for tensor in tensors]
    return {"values": values, "weights": weights, "read": reader.sums, "deferred": deferred, "waits": len(arrived)}
