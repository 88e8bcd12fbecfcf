"""A killed run that is started again goes on as if nothing had happened, bit for bit."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Ranks

CELL = "tests.support.cells:train"

AXES = {
    "device": ("cpu", "xla"),
    "nproc": (1, 2),
    "accumulation": (1, 2),
    "workers": (0, 2),
    "saves": ("now", "behind"),
}
MATRIX = [dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())]
SAMPLE = [
    {"device": "cpu", "nproc": 1, "accumulation": 1, "workers": 2, "saves": "now"},
    {"device": "cpu", "nproc": 2, "accumulation": 2, "workers": 0, "saves": "now"},
    {"device": "cpu", "nproc": 2, "accumulation": 1, "workers": 0, "saves": "behind"},
    {"device": "xla", "nproc": 1, "accumulation": 2, "workers": 2, "saves": "behind"},
]


def cells() -> list[Any]:
    """Every cell, marked: those of the sample run always, the others in `make prove`."""
    marked = []
    for cell in MATRIX:
        marks = [pytest.mark.xla] if cell["device"] == "xla" else []
        marks += [] if cell in SAMPLE else [pytest.mark.prove]
        marked.append(pytest.param(cell, marks=marks, id="-".join(map(str, cell.values()))))
    return marked


def options(cell: dict[str, Any], folder: Path) -> dict[str, Any]:
    """14 steps over two and a half epochs of 28 samples, saved every 3 steps, logged every 2, dropout on."""
    return {
        "output_dir": str(folder),
        "device": cell["device"],
        "gradient_accumulation_steps": cell["accumulation"],
        "dataloader_num_workers": cell["workers"],
        "per_device_train_batch_size": 4 // cell["nproc"] // cell["accumulation"] or 1,
        "samples": 25,
        "max_steps": 14,
        "logging_steps": 2,
        "save_strategy": "steps",
        "save_steps": 3,
        "async_save": cell.get("saves") == "behind",  # else it is certain which checkpoint a kill finds
        "eval_strategy": "epoch",
        "resume_from_checkpoint": True,
    }


@pytest.mark.parametrize("cell", cells())
def test_a_killed_run_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path, cell: dict[str, Any]) -> None:
    undisturbed = ranks.run(CELL, options(cell, tmp_path / "whole"), nproc=cell["nproc"]).check()
    killed = options(cell, tmp_path / "killed")
    first = ranks.run(CELL, {**killed, "kill_at": 5}, nproc=cell["nproc"])
    assert -9 in first.codes
    second = ranks.run(CELL, {**killed, "kill_at": 11, "kill_ranks": [cell["nproc"] - 1]}, nproc=cell["nproc"])
    assert -9 in second.codes
    resumed = ranks.run(CELL, killed, nproc=cell["nproc"]).check()
    if cell["saves"] == "now":
        assert resumed[0]["resumed"] == [3, 9]
    else:
        assert resumed[0]["resumed"], "killed twice before a save had ended"
        assert set(resumed[0]["resumed"]) <= {3, 6, 9}
    assert resumed[0]["losses"] == undisturbed[0]["losses"]
    assert resumed[0]["evaluations"] == undisturbed[0]["evaluations"]
    assert {result["weights"] for result in resumed} == {undisturbed[0]["weights"]}


def test_resuming_at_an_epochs_end_still_ends_the_epoch(ranks: Ranks, tmp_path: Path) -> None:
    """Killed between the save at an epoch's last step and the evaluation that the epoch's end asks for."""
    cell = {"device": "cpu", "nproc": 1, "accumulation": 1, "workers": 0}
    steps = {"save_steps": 7, "max_steps": 9}  # 7 steps an epoch
    (undisturbed,) = ranks.run(CELL, {**options(cell, tmp_path / "whole"), **steps}).check()
    killed = {**options(cell, tmp_path / "killed"), **steps}
    assert ranks.run(CELL, {**killed, "kill_at_event": "on_epoch_end"}).codes == [-9]
    (resumed,) = ranks.run(CELL, killed).check()
    assert resumed["resumed"] == [7]
    assert resumed["evaluations"] == undisturbed["evaluations"]
    assert resumed["weights"] == undisturbed["weights"]


def test_resuming_on_another_mesh_sees_every_sample_once(ranks: Ranks, tmp_path: Path) -> None:
    """One rank, then two with the same global batch, then one again: the losses of one rank throughout."""
    cell = {"device": "cpu", "nproc": 1, "accumulation": 1, "workers": 0}
    plain = {**options(cell, tmp_path / "whole"), "dropout": 0.0}
    (undisturbed,) = ranks.run(CELL, plain).check()
    moved = {**options(cell, tmp_path / "moved"), "dropout": 0.0}
    ranks.run(CELL, {**moved, "kill_at": 4})
    two = {**moved, "per_device_train_batch_size": 2, "kill_at": 10}
    ranks.run(CELL, two, nproc=2)
    (resumed,) = ranks.run(CELL, moved).check()
    assert resumed["resumed"] == [3, 9]
    for step, (loss, norm) in undisturbed["losses"].items():
        assert resumed["losses"][step] == pytest.approx([loss, norm], rel=1e-5)
