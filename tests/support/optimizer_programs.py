"""Optimizers of users' own, each with something that torch's lack, and trainings with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stepmark import Trainer, TrainingArguments
from stepmark.errors import UsageError
from tests.support.programs import Blocks, tiny_model

STEPS, SAVED, BATCH = 4, 2, 4
MESHES: dict[str, dict[str, Any]] = {
    "one": {},
    "zero_1": {"zero_1": True},
    "fsdp": {"fsdp": True},
    "tp": {"tensor_parallel_size": 2},
}


class Attributes(torch.optim.Optimizer):
    """Momentum, with a rate that falls with a count of steps, which is an attribute."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})
        self.steps = 0

    def momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "m" not in state:
            state["m"] = torch.zeros_like(parameter)
        return state["m"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                moment = self.momentum(parameter).mul_(0.9).add_(parameter.grad)
                parameter.add_(moment, alpha=-group["lr"] / self.steps)


class OwnStateDict(Attributes):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["count"]
        super().load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})


class Hooks(Attributes):
    """With torch's hooks, and a count whose name no attribute has."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, lr)
        self.register_state_dict_post_hook(lambda own, state: {**state, "count": own.steps})
        self.register_load_state_dict_post_hook(lambda own: None)
        self.register_load_state_dict_pre_hook(take_count)


def take_count(own: Any, state: dict[str, Any]) -> dict[str, Any]:
    own.steps = state["count"]
    return {name: value for name, value in state.items() if name != "count"}


class Global(Attributes):
    """State under a key that is no parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps = self.state.setdefault("all", {"steps": 0})["steps"]  # type: ignore[call-overload]
        super().step()
        self.state["all"]["steps"] = self.steps  # type: ignore[index]


class Lookahead(OwnStateDict):
    """Slow weights in a list of its own (Zhang et al. 2019)."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, lr)
        self.slow = [each.detach().clone() for group in self.param_groups for each in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for slow, fast in zip(self.slow, (each for g in self.param_groups for each in g["params"]), strict=True):
            slow.lerp_(fast, 0.5)
            fast.lerp_(slow, 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self.slow}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for live, saved in zip(self.slow, state_dict["slow"], strict=True):
            live.copy_(saved)
        super().load_state_dict(state_dict)


class Modes(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al. 2024): gradients are taken between the average and z; the average counts."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 0.5, beta: float = 0.8) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "count": 0, "training": False})

    def train(self) -> None:
        self._move(training=True)

    def eval(self) -> None:
        self._move(training=False)

    @torch.no_grad()
    def _move(self, *, training: bool) -> None:
        for group in self.param_groups:
            weight = 1 - group["beta"] if training else 1 - 1 / group["beta"]
            for parameter in group["params"] if group["training"] != training else ():
                if "z" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["z"], weight)
            group["training"] = training

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["training"]
            group["count"] += 1
            for parameter in (each for each in group["params"] if each.grad is not None):
                z = self.state[parameter].setdefault("z", parameter.clone())
                average = parameter.lerp(z, 1 - 1 / group["beta"])
                z.sub_(parameter.grad, alpha=group["lr"])
                average.lerp_(z, 1 / group["count"])
                parameter.copy_(average.lerp_(z, 1 - group["beta"]))


class Closure(Attributes):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        closure()
        super().step()


class Constructor(Attributes):
    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["m"] = torch.full_like(parameter, 0.01)


class Nested(Attributes):
    """State that is made in a later step, and tensors inside other values."""

    def momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        state["steps"] = [*state.get("steps", []), self.steps]
        if self.steps == 1:
            return torch.zeros_like(parameter)
        moments = state.setdefault("moments", {"m": [torch.zeros_like(parameter)], "of": torch.zeros(())})
        moments["of"] += 1
        return moments["m"][0]


KINDS: dict[str, type[torch.optim.Optimizer]] = {
    "nested": Nested,
    "state_dict": OwnStateDict,
    "hooks": Hooks,
    "global": Global,
    "tensors": Lookahead,
    "modes": Modes,
    "closure": Closure,
    "attributes": Attributes,
    "constructor": Constructor,
}


class Creates(Trainer):
    kind: type[torch.optim.Optimizer]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = self.kind(self.model.parameters())  # type: ignore[call-arg]
        return self.optimizer


def run(cell: dict[str, Any], folder: str, ranks: int, mesh: dict[str, Any], resume: str | None = None) -> Any:
    """Trains with the optimizer of a cell (`kind`, `made`) and saves the model. Returns the losses of evaluations and
    the optimizer's count of steps, or the error of what is refused, which has trained nothing."""
    model, kind = tiny_model(0.0), KINDS[cell["kind"]]
    made: dict[str, Any] = {"train_dataset": Blocks(STEPS * BATCH, ragged=False), "eval_dataset": Blocks(4, seed=1)}
    trainer: Trainer | None = None
    try:
        args = TrainingArguments(
            folder,
            device="cpu",
            max_steps=STEPS,
            save_steps=SAVED,
            eval_strategy="steps",
            eval_steps=SAVED,
            per_device_train_batch_size=BATCH * mesh.get("tensor_parallel_size", 1) // ranks,
            train_sampling_strategy="sequential",
            lr_scheduler_type="constant",
            learning_rate=1e-2,
            optim="muon" if cell["made"] == "optim" else "adamw_torch",
            disable_tqdm=True,
            **mesh,
        )
        if cell["made"] == "given":
            made["optimizers"] = (kind(model.parameters()), None)  # type: ignore[call-arg]
        owner = type("Creates", (Creates,), {"kind": kind}) if cell["made"] == "create_optimizer" else Trainer
        trainer = owner(model, args, **made)
        trainer.train(resume_from_checkpoint=resume)
    except UsageError as error:
        assert trainer is None or trainer.state.global_step == 0
        return str(error)
    trainer.save_model()
    evaluations = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    return [evaluations, getattr(trainer.optimizer, "steps", None)]


def run_each(jobs: list[list[Any]]) -> list[Any]:
    return [run(*job) for job in jobs]


def plain(name: str, folder: Path) -> list[float]:
    """The same by torch alone, in a loop: the losses of evaluations, and the weights, after each save, in files."""
    model = tiny_model(0.0)
    kind: Any = KINDS[name]
    optimizer, data = kind(model.parameters()), Blocks(STEPS * BATCH, ragged=False)
    losses, held = [], Blocks(4, seed=1)
    for step in range(STEPS):
        getattr(optimizer, "train", lambda: None)()
        own = slice(step * BATCH, (step + 1) * BATCH)
        model(input_ids=data.tokens[own], labels=data.labels[own]).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % SAVED == 0:
            getattr(optimizer, "eval", lambda: None)()
            with torch.no_grad():
                losses.append(float(model(input_ids=held.tokens, labels=held.labels).loss))
            torch.save(model.state_dict(), folder / f"{step + 1}.pt")
    return losses


class Half(Trainer):
    """Trains the block alone; the rest has gradients all the same."""

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.AdamW(self.model.transformer.h.parameters(), lr=1e-2)
        return self.optimizer


def norms(folder: str, meshes: list[dict[str, Any]], batch: int) -> list[list[float]]:
    """The gradient norms and the losses of trainings that clip."""
    found = []
    for number, mesh in enumerate(meshes):
        args = TrainingArguments(
            f"{folder}/{number}", device="cpu", max_steps=3, logging_steps=1, save_strategy="no", max_grad_norm=0.1,
            per_device_train_batch_size=batch * mesh.get("tensor_parallel_size", 1), disable_tqdm=True, **mesh,
        )  # fmt: skip
        trainer = Half(tiny_model(0.0, layers=2), args, train_dataset=Blocks(12))
        trainer.train()
        logs = [log for log in trainer.state.log_history if "grad_norm" in log]
        found.append([log[name] for log in logs for name in ("grad_norm", "loss")])
    return found


def averaged(folder: str, kind: type[torch.optim.Optimizer], resume: str | None = None, **options: Any) -> Trainer:
    """A run of six steps with an optimizer that has modes."""
    model = tiny_model(0.0)
    args = TrainingArguments(
        folder, device="cpu", max_steps=6, per_device_train_batch_size=2, disable_tqdm=True, logging_steps=1,
        lr_scheduler_type="constant", **options,
    )  # fmt: skip
    trainer = Trainer(
        model, args, train_dataset=Blocks(12), eval_dataset=Blocks(4, seed=1),
        optimizers=(kind(model.parameters(), lr=0.1), None),  # type: ignore[call-arg]
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer
