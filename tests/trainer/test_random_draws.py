"""What user code draws, from the global generators and its own, wherever a run calls it: after a resume, and on every
rank."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from stepmark import Trainer, TrainingArguments
from tests.support.programs import VOCABULARY, StopsAt, checksum, tiny_model
from tests.support.ranks import Ranks

EVENTS = [
    *("on_epoch_begin", "on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step"),
    *("on_step_end", "on_log", "on_evaluate", "on_save", "on_epoch_end"),
]
STEPS, SAVED, STOPPED = 8, 3, 4
SAMPLE = [index % VOCABULARY for index in range(8)]


outside = np.random.default_rng(1)  # of what a Trainer calls


def draws(*own: float) -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(())), *own]


class Loud(torch.nn.Module):
    """Multiplies losses by noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {"noise": torch.Generator()}
        self.drawn: list[float] = []

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        self.drawn.append(float(torch.rand((), generator=self.kept["noise"])))
        return loss * (1 + 0.1 * self.drawn[-1])


class NoisyTrainer(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, **options)
        factor = 1 + 0.1 * float(self.noise.normal()) + 0.1 * float(outside.uniform())
        loss = model.loud(loss) * factor
        return (loss, outputs) if return_outputs else loss


class Records(TrainerCallback):
    """Draws at each event, and changes the weights by it after each step. By step: the events and what they drew."""

    def __init__(self) -> None:
        self.drawn: dict[int, list[Any]] = {}
        self.own = random.Random(1)

    def draw(self, event: str, step: int) -> list[float]:
        values = draws(self.own.random())
        self.drawn.setdefault(step, []).append([event, *values])
        return values

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        noise = sum(self.draw("on_step_end", state.global_step))
        with torch.no_grad():
            next(model.parameters()).mul_(1 + 0.01 * noise)


def record(event: str) -> Any:
    return lambda self, args, state, control, **_: self.draw(event, state.global_step) and control


for each in EVENTS:
    if each != "on_step_end":
        setattr(Records, each, record(each))


class Noisy(torch.optim.SGD):
    """Adds noise to what it updates: all ranks have to draw the same."""

    drawn: list[list[float]]
    noise: np.random.RandomState

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.drawn.append(draws(float(self.noise.uniform())))
        for group in self.param_groups:
            for parameter in group["params"]:
                with torch.no_grad():
                    parameter.mul_(1 + 0.01 * sum(self.drawn[-1]))


def train(folder: str, device: str, stop: int | None, options: dict[str, Any]) -> dict[str, Any]:
    random.seed(stop)
    np.random.seed(stop)
    model, records, found = tiny_model(), Records(), []
    if device != "xla":
        model.loud = Loud()
    optimizer = None if options.get("fsdp") or device == "xla" else Noisy(model.parameters(), lr=0.1)
    if optimizer is not None:
        optimizer.drawn, optimizer.noise = [], np.random.RandomState(1)
    metrics = np.random.default_rng(1)
    torch.manual_seed(stop or 0)
    arguments = TrainingArguments(
        output_dir=folder,
        device=device,
        max_steps=STEPS,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=SAVED,
        logging_steps=1,
        disable_tqdm=True,
        **options,
    )
    trainer = (Trainer if device == "xla" else NoisyTrainer)(
        model,
        arguments,
        train_dataset=[{"input_ids": SAMPLE, "labels": SAMPLE}] * 10,
        eval_dataset=[{"input_ids": SAMPLE, "labels": SAMPLE}] * 2,
        compute_metrics=lambda _: found.append(draws(metrics.uniform())) or {},
        callbacks=[records, StopsAt(stop)],
        optimizers=(optimizer, None),
    )
    trainer.noise = np.random.default_rng(2)
    trainer.train(resume_from_checkpoint=stop is None and Path(folder).exists())
    updates = [] if optimizer is None else optimizer.drawn
    return {"events": records.drawn, "updates": updates, "metrics": found, "weights": checksum(trainer)}


@pytest.mark.parametrize(
    ("device", "nproc", "options"),
    [
        pytest.param("cpu", 1, {}, id="one rank"),
        pytest.param("cpu", 2, {}, id="two ranks"),
        pytest.param("cpu", 2, {"fsdp": "full_shard"}, id="fsdp"),
        pytest.param("cpu", 1, {"data_parallel_replicas": 2}, id="hosted"),
        pytest.param("simulated", 2, {}, id="native"),
        pytest.param("xla", 1, {}, id="lazy", marks=pytest.mark.xla),
    ],
)
def test_what_callbacks_optimizers_and_metrics_draw_is_the_same_after_a_resume(
    request: pytest.FixtureRequest, tmp_path: Path, device: str, nproc: int, options: dict[str, Any]
) -> None:
    ranks: Ranks = request.getfixturevalue("native_ranks" if device == "simulated" else "ranks")

    def run(name: str, stop: int | None) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = ranks.run(train, str(tmp_path / name), device, stop, options, nproc=nproc).check()
        return found

    whole = run("whole", None)
    run("cut", STOPPED)
    resumed = run("cut", None)
    assert [each["weights"] for each in resumed] == [each["weights"] for each in whole]
    for ours, expected in zip(resumed, whole, strict=True):
        for step in range(SAVED + 1, STEPS + 1):
            assert ours["events"][str(step)] == expected["events"][str(step)]
        for kind in ("updates", "metrics"):
            assert ours[kind] == expected[kind][len(expected[kind]) - len(ours[kind]) :]
        assert expected["updates"] == whole[0]["updates"]
        drawn = [tuple(values) for step in expected["events"].values() for _, *values in step]
        assert len(set(drawn)) == len(drawn)
    assert whole[0]["metrics"]


def test_processes_that_host_ranks_draw_what_ranks_do(ranks: Ranks, tmp_path: Path) -> None:
    each = ranks.run(train, str(tmp_path / "ranks"), "cpu", None, {}, nproc=2).check()
    hosted = ranks.run(train, str(tmp_path / "hosted"), "cpu", None, {"data_parallel_replicas": 2}, nproc=1).check()
    assert hosted[0]["weights"] == each[0]["weights"]
    assert hosted[0]["updates"] == each[0]["updates"]
