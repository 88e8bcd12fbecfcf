"""Programs for ranks: runs of logical ranks, whose numbers must not depend on how many processes host them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM, TrainerCallback

from stepmark import (
    Conversations,
    DataLoader,
    DevicePrefetcher,
    Mesh,
    MicroBatchLoss,
    Trainer,
    TrainingArguments,
    TrainStep,
    build_optimizer,
    evaluate,
    parallelize,
)
from stepmark.sharding.dtensor import is_dtensor
from tests.data.chat.test_conversations import MARKED, tokenizer
from tests.support.independent_reader import read_checkpoint
from tests.support.models import configuration
from tests.support.programs import LENGTH, VOCABULARY

SAMPLES, RAGGED = 96, 83  # of which the second is no multiple of any step

MODELS = ("gpt2", "llama", "mixtral", "lstm", "batch norm")
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16 autocast": {"bf16": True},
    "bf16 masters": {"dtype": "bfloat16"},
    "bf16 sums": {"bf16": True, "reduce_dtype": "bfloat16"},
    "fp16": {"fp16": True},
}
DATA = ("shuffled", "ragged", "grouped", "stream", "workers", "drawn", "no targets", "packed")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"optim": "adamw_torch"},
    "fused": {"optim": "adamw_torch_fused"},
    "sgd": {"optim": "sgd", "learning_rate": 0.1},
    "muon": {"optim": "muon", "learning_rate": 0.01},
    "adafactor": {"optim": "adafactor"},
}
HOOKS = ("none", "substep", "training_step", "loss", "update")


class Lstm(nn.Module):
    """An LSTM language model with dropout, and noise that it draws on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 24)
        self.lstm = nn.LSTM(24, 24, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        noise = random.random() + np.random.rand()
        logits = self.head(self.lstm(self.table(input_ids) * (1 + 0.01 * noise))[0])
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


class Normalized(nn.Module):
    """A classifier of each position with BatchNorm, whose statistics training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 24)
        self.norm = nn.BatchNorm1d(24)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.norm(self.table(input_ids).transpose(1, 2)).transpose(1, 2)
        logits = self.head(self.drop(torch.relu(hidden)))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def make_model(kind: str, dtype: str = "float32") -> nn.Module:
    torch.manual_seed(5)
    model: nn.Module
    if kind == "lstm":
        model = Lstm()
    elif kind == "batch norm":
        model = Normalized()
    elif kind == "gpt2":
        model = AutoModelForCausalLM.from_config(configuration("gpt2", dropout=0.1))
    else:
        model = AutoModelForCausalLM.from_config(configuration(kind))
    return model.to(getattr(torch, dtype))


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Tokens of one length, and labels of which some are ignored; all of every third sample with `empty`. `drawn`: the
    first token is drawn from each global generator when the sample is read."""

    def __init__(self, count: int, *, empty: bool = False, drawn: bool = False, ragged: bool = False) -> None:
        generator = torch.Generator().manual_seed(count)
        self.tokens = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)
        self.lengths = torch.randint(3, LENGTH, (count,), generator=generator)
        self._empty, self._drawn, self._ragged = empty, drawn, ragged

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids, length = self.tokens[index].clone(), int(self.lengths[index])
        if self._drawn:
            ids[0] = int(VOCABULARY * (torch.rand(()).item() + random.random() + np.random.rand()) / 3)
        labels = ids.clone()
        labels[length:] = -100
        if self._empty and index % 3:
            labels[:] = -100
        if self._ragged:
            return {"input_ids": ids[:length], "labels": labels[:length]}
        return {"input_ids": ids, "labels": labels}


class Stream(IterableDataset[dict[str, Tensor]]):
    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from (self._samples[index] for index in range(len(self._samples)))


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    return {
        "input_ids": pad([each["input_ids"] for each in samples]),
        "labels": pad([each["labels"] for each in samples], padding_value=-100),
    }


def packed_conversations() -> Conversations:
    """Blocks that hold several conversations, of which only answers are targets."""
    draw = random.Random(4)

    def turn(role: str) -> dict[str, str]:
        return {"role": role, "content": " ".join(draw.choices(("hello", "fine", "thanks", "?"), k=draw.randint(1, 3)))}

    rows = [{"messages": [turn("user"), turn("assistant")]} for _ in range(SAMPLES)]
    return Conversations(rows, tokenizer(MARKED), max_length=LENGTH, packing=True, assistant_only_loss=True)


def data_of(kind: str) -> tuple[Any, dict[str, Any]]:
    """The training data, and the arguments that they need."""
    if kind == "stream":
        return Stream(Samples(SAMPLES)), {}
    if kind == "grouped":
        options = {"train_sampling_strategy": "group_by_length"}
        return Samples(RAGGED, ragged=True), {"options": options, "data_collator": padded}
    if kind == "workers":
        return Samples(RAGGED, drawn=True), {"options": {"dataloader_num_workers": 2}}
    if kind == "packed":
        return packed_conversations(), {}
    if kind == "drawn":
        return Samples(SAMPLES, drawn=True), {}
    return Samples(RAGGED if kind == "ragged" else SAMPLES, empty=kind == "no targets"), {}


class Halving(TrainerCallback):
    """Changes the gradients of one logical rank between its micro-batches."""

    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None and parameter.ndim == 1:
                parameter.grad = parameter.grad * 0.5


class Drawing(TrainerCallback):
    """Changes gradients and weights by numbers that it draws around the update, from torch's generator."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(torch.rand(()).item())

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        with torch.no_grad():
            next(model.parameters()).mul_(1 + 0.01 * torch.rand(()).item())


CALLBACKS = {"substep": Halving, "update": Drawing}


class Stepping(Trainer):
    """Draws in its own training step."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        inputs["input_ids"][:, 0] = int(torch.randint(VOCABULARY, ()).item() + random.random() > 30)
        return super().training_step(model, inputs, num_items_in_batch)


class Losing(Trainer):
    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        loss = outputs["loss"] * (1 + 0.1 * torch.rand((), device=inputs["input_ids"].device))
        return (loss, outputs) if return_outputs else loss


def mean_of_predictions(prediction: Any) -> dict[str, float]:
    found = prediction.predictions
    logits = found[0] if isinstance(found, tuple) else found  # a mixture's router has logits too
    return {"mean": float(np.mean(logits, dtype=np.float64)), "rows": float(len(prediction.label_ids))}


def train(folder: str, cell: dict[str, Any], last: int | None = None) -> dict[str, Any]:
    """Trains, or goes on, up to the step `last`. Returns every logged number, and a digest of the newest checkpoint's
    model and optimizer."""
    precision, (dataset, given) = PRECISIONS[cell["precision"]], data_of(cell["data"])
    options: dict[str, Any] = {
        "output_dir": folder,
        "device": "cpu",
        "data_parallel_replicas": cell["replicas"],
        "num_train_epochs": 2,
        "max_steps": 10 if cell["data"] == "stream" else -1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": cell["accumulation"],
        "per_device_eval_batch_size": 2,
        "zero_1": cell["sharding"] == "zero_1",
        "fsdp": "full_shard" if cell["sharding"] == "fsdp" else None,
        "ddp_bucket_cap_mb": None,
        "learning_rate": 0.01,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "include_num_input_tokens_seen": True,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_steps": 1,
        "save_total_limit": 2,
        "disable_tqdm": True,
        "resume_from_checkpoint": "true",
        "seed": 3,
        "tensor_parallel_size": cell.get("tp", 1),
        "pipeline_parallel_size": cell.get("pp", 1),
        **OPTIMIZERS[cell["optimizer"]],
        **precision,
        **given.get("options", {}),
    }
    hook = cell.get("hook", "none")
    kind = {"training_step": Stepping, "loss": Losing}.get(hook, Trainer)
    trainer = kind(
        make_model(cell["model"], options.get("dtype", "float32")),
        TrainingArguments(**options),
        data_collator=given.get("data_collator"),
        train_dataset=dataset,
        eval_dataset=Samples(3 if cell.get("few") else 21),
        compute_metrics=mean_of_predictions,
        callbacks=[CALLBACKS[hook]()] if hook in CALLBACKS else [],
    )
    if last is not None:
        trainer.add_callback(StopAt(last))
    trainer.train()
    trainer.context.host.barrier()
    names = ("loss", "grad_norm", "eval_loss", "eval_mean", "eval_rows", "learning_rate", "epoch", "num_tokens")
    names += ("num_input_tokens_seen", "total_flos")
    history = [{name: log[name] for name in ("step", *names) if name in log} for log in trainer.state.log_history]
    return {"history": history, "digest": digest_of(Path(folder))}


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= self._step:
            control.should_training_stop = control.should_save = True


def digest_of(folder: Path) -> str:
    """Of the tensors in the newest checkpoint, whatever mesh has saved it."""
    newest = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    *_, groups = read_checkpoint(newest)
    found = hashlib.sha256()
    for group, tensors in sorted(groups.items()):
        for name, tensor in sorted(tensors.items()):
            found.update(f"{group} {name} {tensor.shape}".encode() + tensor.tobytes())
    return f"{newest.name} {found.hexdigest()}"


def own_loop(replicas: int, fsdp: bool = False) -> list[Any]:
    """The loop of docs/tutorials/own-loop.md: every step's statistics, an evaluation, and a digest of the weights."""
    mesh = Mesh.create(device="cpu", data_parallel_replicas=replicas)
    model = parallelize(make_model("gpt2"), mesh, fsdp=fsdp)
    optimizer = build_optimizer("adamw_torch_fused", list(model.named_parameters()), mesh.runtime, learning_rate=1e-2)
    loader = DataLoader(Samples(RAGGED), 2, rank=mesh.ranks.own, world_size=mesh.ranks.total, accumulation=2)
    step, found = TrainStep(model, optimizer, MicroBatchLoss(model), mesh, accumulation=2), []
    for number, batch in enumerate(DevicePrefetcher(loader, mesh.runtime)):
        found += step(number, batch).values.tolist()
    step.settle()
    found.append(evaluate(model, Samples(21), mesh=mesh, batch_size=2)["eval_loss"])
    whole = [each.full_tensor() if is_dtensor(each) else each for each in model.parameters()]
    weights = b"".join(each.detach().numpy().tobytes() for each in whole)
    return [*found, hashlib.sha256(weights).hexdigest()]
