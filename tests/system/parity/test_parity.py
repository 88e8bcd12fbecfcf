"""The same losses whatever runs them: a loop by hand, more ranks, a lazy device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stepmark import DataLoader
from stepmark.runtime.seeds import derive_seed
from tests.support.devices import devices
from tests.support.programs import Blocks, tiny_model
from tests.support.ranks import Ranks

PROGRAM = "tests.support.programs:train"


def losses(result: dict[str, Any]) -> list[list[float]]:
    return [result["losses"][step] for step in sorted(result["losses"], key=int)]


def close(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float) -> None:
    pairs = list(zip(losses(ours), losses(theirs), strict=True))
    assert len(pairs) >= 8
    for (loss, norm), (other_loss, other_norm) in pairs:
        assert loss == pytest.approx(other_loss, rel=tolerance)
        assert norm == pytest.approx(other_norm, rel=10 * tolerance)


def hand_written_loop(steps: int) -> list[list[float]]:
    """What a careful engineer writes for a few steps in plain PyTorch, with the same data and dropout seeds."""
    model = tiny_model()
    decaying = [p for name, p in model.named_parameters() if "ln" not in name and not name.endswith("bias")]
    sparing = [p for name, p in model.named_parameters() if "ln" in name or name.endswith("bias")]
    groups = [{"params": decaying, "weight_decay": 0.01}, {"params": sparing, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, (steps - step) / steps))
    loader = DataLoader(Blocks(30, ragged=False), 4, seed=42)
    logs: list[list[float]] = []
    while len(logs) < steps:
        for batch in loader:
            torch.manual_seed(derive_seed(42, len(logs), 0, 0))
            loss = model(**batch[0].inputs).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            logs.append([loss.item(), norm.item()])
            if len(logs) == steps:
                break
    return logs


def by_hand() -> list[list[float]]:
    return hand_written_loop(20)


def test_one_rank_equals_a_hand_written_loop_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    options = {"output_dir": str(tmp_path), "device": "cpu", "max_steps": 20, "weight_decay": 0.01, "ragged": False}
    (ours,) = ranks.run(PROGRAM, {**options, "per_device_train_batch_size": 4}).check()
    (expected,) = ranks.run(by_hand).check()
    assert losses(ours) == expected


@pytest.mark.xla
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"optim": "sgd", "optim_args": "momentum=0.9,nesterov=true"}, marks=pytest.mark.prove)]
)
def test_xla_equals_cpu(ranks: Ranks, tmp_path: Path, options: dict[str, Any]) -> None:
    options = {**options, "dropout": 0.0, "weight_decay": 0.01, "gradient_accumulation_steps": 2}
    (eager,) = ranks.run(PROGRAM, {**options, "device": "cpu", "output_dir": str(tmp_path / "cpu")}).check()
    (lazy,) = ranks.run(PROGRAM, {**options, "device": "xla", "output_dir": str(tmp_path / "xla")}).check()
    close(lazy, eager, 1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("xla", marks=[pytest.mark.xla, pytest.mark.prove])])
def test_ranks_start_from_identical_weights(ranks: Ranks, tmp_path: Path, device: str) -> None:
    options = {"device": device, "dropout": 0.0, "max_steps": 8}
    same = ranks.run(PROGRAM, {**options, "output_dir": str(tmp_path / "s"), "model_seed": [5, 5]}, nproc=2).check()
    other = ranks.run(PROGRAM, {**options, "output_dir": str(tmp_path / "o"), "model_seed": [5, 6]}, nproc=2).check()
    assert losses(other[0]) == losses(same[0])
    assert other[0]["weights"] == other[1]["weights"] == same[0]["weights"]


@pytest.mark.parametrize("device", devices(pytest.mark.prove))
@pytest.mark.parametrize("options", [{"bf16": True}, {"dtype": "bfloat16"}], ids=["autocast", "bfloat16"])
def test_training_learns_with(ranks: Ranks, tmp_path: Path, device: str, options: dict[str, Any]) -> None:
    check_learning(ranks, tmp_path, device, options)


@pytest.mark.xla
def test_training_in_autocast_learns_on_a_lazy_device(ranks: Ranks, tmp_path: Path) -> None:
    check_learning(ranks, tmp_path, "xla", {"bf16": True})


def check_learning(ranks: Ranks, folder: Path, device: str, options: dict[str, Any]) -> None:
    """One sample again and again: the loss falls well below that of guessing."""
    common = {"device": device, "samples": 2, "max_steps": 40, "learning_rate": 1e-2, "dropout": 0.0}
    (result,) = ranks.run(PROGRAM, {**common, **options, "output_dir": str(folder)}).check()
    assert losses(result)[-1][0] < 2.0 < 4.0 < losses(result)[0][0]
    if result["counters"] is not None:
        assert result["counters"][0] <= 2  # graphs: the step's, and for bf16 parameters none more


def test_gradient_checkpointing_changes_nothing(ranks: Ranks, tmp_path: Path) -> None:
    plain = {"device": "cpu", "output_dir": str(tmp_path / "plain")}
    again = {"device": "cpu", "output_dir": str(tmp_path / "again"), "gradient_checkpointing": True}
    assert losses(ranks.run(PROGRAM, plain).check()[0]) == losses(ranks.run(PROGRAM, again).check()[0])
