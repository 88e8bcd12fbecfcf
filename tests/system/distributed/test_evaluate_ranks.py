"""Metrics are those of a plain loop over the samples, on any device and number of ranks, of live models and of
checkpoints that another mesh has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from stepmark import Mesh, Trainer, TrainingArguments, evaluate
from tests.support.models import build
from tests.support.programs import Blocks
from tests.support.ranks import Ranks

COUNTS = [1, 7, 13]
PROVE = pytest.mark.prove
XLA = pytest.mark.xla


def case(device: str, nproc: int, tp: int, *marks: Any) -> Any:
    return pytest.param(device, nproc, tp, marks=marks, id=f"{device}-{nproc}-tp{tp}")


@pytest.mark.parametrize(
    ("device", "nproc", "tp"),
    [
        case("cpu", 1, 1, PROVE),
        case("cpu", 2, 1, PROVE),
        case("cpu", 4, 1, PROVE),
        case("cpu", 2, 2),
        case("cpu", 4, 2, PROVE),
        case("xla", 1, 1, XLA, PROVE),
        case("xla", 2, 1, XLA, PROVE),
        case("xla", 4, 1, XLA, PROVE),
        case("xla", 2, 2, XLA, PROVE),
        case("xla", 4, 2, XLA, PROVE),
    ],
)
def test_metrics_are_those_of_a_plain_loop(ranks: Ranks, tmp_path: Path, device: str, nproc: int, tp: int) -> None:
    results = ranks.run(evaluated, device, str(tmp_path), COUNTS, tp, nproc=nproc).check()
    for count, of_ranks in zip(COUNTS, zip(*results, strict=True), strict=True):
        expected = plain_loop(count)
        for found in [way for rank in of_ranks for way in rank]:
            assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)
            assert found["eval_accuracy"] == expected["eval_accuracy"]
            assert found["eval_counted"] == expected["eval_counted"]


@pytest.mark.parametrize(
    ("device", "nproc", "options"),
    [
        pytest.param("cpu", 2, {"zero_1": True}, id="cpu-zero1"),
        pytest.param("cpu", 2, {"tensor_parallel_size": 2, "dtype": "bfloat16"}, id="cpu-tp-bf16"),
        pytest.param("xla", 2, {"tensor_parallel_size": 2}, marks=[XLA, PROVE], id="xla-tp"),
        pytest.param("xla", 2, {"zero_1": True}, marks=[XLA, PROVE], id="xla-zero1"),
    ],
)
def test_a_checkpoint_of_any_mesh_is_evaluated_on_one_rank(
    ranks: Ranks, tmp_path: Path, device: str, nproc: int, options: dict[str, Any]
) -> None:
    (in_run, *_) = ranks.run(train_and_save, device, str(tmp_path), options, nproc=nproc).check()
    for step in (2, 4):
        (beside,) = ranks.run(evaluate_checkpoint, "cpu", str(tmp_path / f"checkpoint-{step}")).check()
        tolerance = 1e-2 if "dtype" in options else 1e-5  # sums in bfloat16 depend on how they are divided
        assert beside == pytest.approx(in_run[str(step)], rel=tolerance)


@pytest.mark.xla
def test_a_lazy_device_compiles_one_graph_for_all_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    (in_run,) = ranks.run(train_and_save, "cpu", str(tmp_path), {"max_steps": 6}).check()
    (found,) = ranks.run(several_checkpoints, "xla", str(tmp_path), [2, 4, 6]).check()
    assert [loss for loss, _ in found] == pytest.approx([in_run["2"], in_run["4"], in_run["6"]], rel=1e-5)
    assert [compiled for _, compiled in found] == [found[0][1]] * 3


# What ranks run


KIND = "llama"


def accuracy(prediction: Any) -> dict[str, Any]:
    """Right tokens, of those that count, and how many these are."""
    predicted, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    counted = labels != -100
    right = predicted[counted] == labels[counted]
    return {"accuracy": np.mean(right), "counted": counted.sum()}


def best_tokens(logits: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
    return logits.argmax(-1)


def plain_loop(samples: int) -> dict[str, float]:
    """One sample after the other, on the CPU."""
    model, dataset = build(KIND).eval(), Blocks(samples, seed=5)
    total, tokens, right = 0.0, 0, 0
    with torch.no_grad():
        for index in range(samples):
            sample = dataset[index]
            logits, labels = model(sample["input_ids"][None]).logits[0, :-1], sample["labels"][1:]
            total += F.cross_entropy(logits, labels, reduction="none").double().sum().item()
            tokens += int((labels != -100).sum())
            right += int((logits.argmax(-1) == labels)[labels != -100].sum())
    return {"eval_loss": total / tokens, "eval_accuracy": right / tokens, "eval_counted": tokens}


def evaluated(device: str, folder: str, counts: list[int], tp: int = 1) -> list[list[dict[str, float]]]:
    """For each number of samples: what the Trainer says, and what `stepmark.evaluate` says."""
    model = build(KIND)
    args = TrainingArguments(
        output_dir=folder, device=device, per_device_eval_batch_size=3, tensor_parallel_size=tp, disable_tqdm=True
    )
    trainer = Trainer(model, args, preprocess_logits_for_metrics=best_tokens)
    # As where processors differ, or ties are broken at random: the best model and the schedule follow one of them.
    trainer.compute_metrics = lambda given: {**accuracy(given), "rank": trainer.context.host.rank}
    found = []
    for count in counts:
        dataset = Blocks(count, seed=5)
        options: dict[str, Any] = {"compute_metrics": accuracy, "preprocess_logits_for_metrics": best_tokens}
        batch_size = 3 if trainer.context.runtime.lazy else 2  # another would be another graph
        beside = evaluate(model, dataset, mesh=trainer.mesh, batch_size=batch_size, **options)
        both = [trainer.evaluate(dataset), beside]
        assert both[0]["eval_rank"] == 0
        found.append([{name: each[name] for name in ("eval_loss", "eval_accuracy", "eval_counted")} for each in both])
    return found


def train_and_save(device: str, folder: str, options: dict[str, Any]) -> dict[int, float]:
    """Trains the model on random tokens with an evaluation at each save; the in-run losses by step."""
    defaults = {"max_steps": 4, "save_steps": 2, "eval_steps": 2, "eval_strategy": "steps", "learning_rate": 1e-3}
    args = TrainingArguments(
        output_dir=folder, device=device, disable_tqdm=True, per_device_train_batch_size=2, **{**defaults, **options}
    )
    trainer = Trainer(build(KIND), args, train_dataset=Blocks(20), eval_dataset=Blocks(7, seed=5))
    trainer.train()
    return {line["step"]: line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line}


def evaluate_checkpoint(device: str, path: str) -> float:
    """The loss of a checkpoint, on as many ranks as there are."""
    return evaluate(Path(path), Blocks(7, seed=5), mesh=Mesh.create(device=device), batch_size=3)["eval_loss"]


def several_checkpoints(device: str, folder: str, steps: list[int]) -> list[list[float]]:
    """The loss of each checkpoint by one reader, and the graphs that were compiled by then."""
    from stepmark.evaluation.restored_model import ModelReader

    mesh = Mesh.create(device=device)
    reader = ModelReader(mesh.runtime)
    found = []
    for step in steps:
        model = reader.read(Path(folder) / f"checkpoint-{step}")
        loss = evaluate(model, Blocks(7, seed=5), mesh=mesh, batch_size=3)["eval_loss"]
        counters = mesh.runtime.counters()
        found.append([loss, counters.compilations if counters is not None else 0])
    return found
