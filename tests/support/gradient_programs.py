"""Programs for ranks: what a script does with gradients around Stepmark's own use of them."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn import all_gather
from torch.nn import functional
from transformers import TrainerCallback

from stepmark import Mesh, Trainer, TrainingArguments, ZeroRedundancyOptimizer
from stepmark.parallel import buckets
from tests.support.programs import Blocks, tiny_model


class Looker(TrainerCallback):
    """Notes the norm of what is in `parameter.grad` before the update, and may change it."""

    def __init__(self, change: str) -> None:
        self.change = change
        self.norms: list[float] = []
        self.after: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **known: Any) -> None:
        parameters = [each for each in model.parameters() if each.grad is not None]
        self.norms.append(_norm([each.grad for each in parameters]))
        if self.change == "clip":
            nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        if self.change == "assign":
            for each in parameters:
                each.grad = each.grad * 0.5

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **known: Any) -> None:
        self.after.append(_norm([each.grad for each in model.parameters() if each.grad is not None]))


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(each.float().square().sum()) for each in tensors))


def _arguments(folder: str, ranks: int, **options: Any) -> TrainingArguments:
    given = {
        "output_dir": folder,
        "device": "cpu",
        "max_steps": 4,
        "per_device_train_batch_size": 4 // ranks,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "max_grad_norm": 0,
    }
    return TrainingArguments(**{**given, **options})


def _history(trainer: Trainer) -> list[tuple[float, float]]:
    return [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]


def look(folder: str, ranks: int, change: str, options: dict[str, Any]) -> dict[str, Any]:
    """Losses and norms of a run, and what a callback saw."""
    buckets.HOST_BUCKET_ELEMENTS = 2000
    looker = Looker(change)
    trainer = Trainer(
        tiny_model(dropout=0.0), _arguments(folder, ranks, **options), train_dataset=Blocks(16), callbacks=[looker]
    )
    trainer.train()
    return {"history": _history(trainer), "norms": looker.norms, "after": looker.after}


def train_twice(folder: str, ranks: int, options: dict[str, Any]) -> dict[str, Any]:
    """The second training of a model, of the same object and of another one with its values; then a loop by hand.
    Nothing is collected meanwhile, and gradients of an earlier backward pass are left."""
    gc.disable()
    dtype = getattr(torch, options.get("dtype", "float32"))

    def trained(model: Any, name: str) -> Trainer:
        arguments = _arguments(str(Path(folder) / name), ranks, **options)
        trainer = Trainer(model, arguments, train_dataset=Blocks(16))
        trainer.train()
        return trainer

    model = tiny_model().to(dtype)
    batch = torch.stack([Blocks(4)[index]["input_ids"] for index in range(4)])
    trained(model, "first")
    again = tiny_model().to(dtype)
    again.load_state_dict(model.state_dict())
    (10 * model(input_ids=batch, labels=batch).loss).backward()
    found, truth = trained(model, "second"), trained(again, "third")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"found": _history(found), "truth": _history(truth), "by_hand": losses}


def two_optimizers(announced: bool, shared: bool) -> float:
    """How far two optimizers of one model are from the mean gradients by hand, where one rank does not use a parameter
    in the third step. `shared`: they are given one mesh."""
    mesh = Mesh.create(device="cpu")
    rank = mesh.data_parallel.rank
    torch.manual_seed(0)
    own = [nn.Parameter(torch.randn(4, 4)) for _ in range(2)]
    truth = [each.detach().clone().requires_grad_() for each in own]
    given: dict[str, Any] = {"lr": 0.1, "grad_clipping": False, **({"mesh": mesh} if shared else {})}
    optimizers = [ZeroRedundancyOptimizer([(str(i), each)], torch.optim.SGD, **given) for i, each in enumerate(own)]
    for step in range(5):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        for optimizer in optimizers if announced else ():
            optimizer.last_backward()
        for first, second in (own, truth):
            hidden = x @ second
            (hidden if step == 2 and rank == 0 else hidden @ first).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        for each in truth:
            gradient = torch.zeros_like(each) if each.grad is None else each.grad
            dist.all_reduce(gradient)
            each.data -= 0.1 * gradient / 2
            each.grad = None
    return max(float((one - other).detach().abs().max()) for one, other in zip(own, truth, strict=True))


def change_after_sending(kind: str) -> list[float]:
    """Norms of steps in which gradients are halved after the last backward pass."""
    mesh = Mesh.create(device="cpu")
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = ZeroRedundancyOptimizer(
        model.named_parameters(), torch.optim.SGD, mesh=mesh, lr=0.0, grad_clipping=False
    )
    norms = []
    for _ in range(3):
        if kind == "announced":
            optimizer.last_backward()
        model(torch.full((2, 4), 1.0 + mesh.data_parallel.rank)).square().mean().backward()
        for each in model.parameters():
            assert each.grad is not None
            each.grad.mul_(0.5)
        optimizer.step()
        norms.append(float(optimizer.grad_norm))
    return norms


class Contrastive(nn.Module):
    """Compares what it makes of its samples with what all ranks make of theirs; some need parameters of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.some = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor, flag: Tensor, labels: Tensor) -> dict[str, Tensor]:
        made = torch.cat([torch.tanh(self.one(x)), torch.tanh(self.two(y))], 1)
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        left, right = (torch.cat(list(all_gather(made))) if ranks > 1 else made).chunk(2, 1)
        count = len(x)
        begin = dist.get_rank() * count if ranks > 1 else 0
        own = self.three(left[begin : begin + count])
        if bool((flag > 0).any()):
            own = own + (flag > 0).float().view(-1, 1) * torch.tanh(self.some(own))
        logits = own @ right.t()
        return {"loss": functional.cross_entropy(logits, torch.arange(count) + begin), "logits": logits}


def contrast(folder: str, ranks: int, options: dict[str, Any]) -> list[tuple[float, float]]:
    buckets.HOST_BUCKET_ELEMENTS = 300
    torch.manual_seed(0)
    model = Contrastive()
    generator = torch.Generator().manual_seed(3)
    rows: Any = [
        {
            "x": torch.randn(16, generator=generator),
            "y": torch.randn(16, generator=generator),
            "flag": 0 if index // 4 in (2, 3) and index % 4 < 2 else 1,
            "labels": 0,
        }
        for index in range(28)
    ]
    arguments = _arguments(folder, ranks, optim="sgd", train_sampling_strategy="sequential", max_steps=7, **options)
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    return _history(trainer)


class Inner(nn.Module):
    """Takes a step of its own by torch.func, which hides parameters in tensors of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 32)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.table(input_ids)
        given = dict(self.body.named_parameters())

        def distance(parameters: dict[str, Tensor]) -> Tensor:
            made = functional.linear(hidden.detach(), parameters["weight"], parameters["bias"])
            return (made - hidden.detach()).square().mean()

        steps = torch.func.grad(distance)(given)
        adapted = {name: each - 0.1 * steps[name] for name, each in given.items()}
        logits = self.head(torch.func.functional_call(self.body, adapted, (hidden,)))
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}
