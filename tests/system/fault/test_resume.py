"""A killed run that is started again goes on as if nothing had happened, bit for bit."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Ranks

PROGRAM, EACH = "tests.support.programs:train", "tests.support.programs:train_each"

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


def cases() -> list[Any]:
    """Every case, marked: those of the sample run always, the others in `make prove`."""
    marked = []
    for case in MATRIX:
        marks = [pytest.mark.xla] if case["device"] == "xla" else []
        marks += [] if case in SAMPLE else [pytest.mark.prove]
        marked.append(pytest.param(case, marks=marks, id="-".join(map(str, case.values()))))
    return marked


def options(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """14 steps over two and a half epochs of 28 samples, saved every 3 steps, logged every 2, dropout on."""
    return {
        "output_dir": str(folder),
        "device": case["device"],
        "gradient_accumulation_steps": case["accumulation"],
        "dataloader_num_workers": case["workers"],
        "per_device_train_batch_size": 4 // case["nproc"] // case["accumulation"] or 1,
        "samples": 25,
        "max_steps": 14,
        "logging_steps": 2,
        "save_strategy": "steps",
        "save_steps": 3,
        "async_save": case.get("saves") == "behind",  # else it is certain which checkpoint a kill finds
        "eval_strategy": "epoch",
        "resume_from_checkpoint": True,
    }


@pytest.mark.parametrize("case", cases())
def test_a_killed_run_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path, case: dict[str, Any]) -> None:
    killed = options(case, tmp_path / "killed")
    first = ranks.run(PROGRAM, {**killed, "kill_at": 5}, nproc=case["nproc"])
    assert -9 in first.codes
    second = ranks.run(PROGRAM, {**killed, "kill_at": 11, "kill_ranks": [case["nproc"] - 1]}, nproc=case["nproc"])
    assert -9 in second.codes
    both = ranks.run(EACH, killed, options(case, tmp_path / "whole"), nproc=case["nproc"]).check()
    resumed, undisturbed = zip(*both, strict=True)
    if case["saves"] == "now":
        assert resumed[0]["resumed"] == [3, 9]
    else:
        assert any(resumed[0]["resumed"]), "killed twice before a save had ended"
        assert set(resumed[0]["resumed"]) <= {0, 3, 6, 9}  # 0 where the first save had not ended, and all began again
    assert resumed[0]["losses"] == undisturbed[0]["losses"]
    assert resumed[0]["evaluations"] == undisturbed[0]["evaluations"]
    assert {result["weights"] for result in resumed} == {undisturbed[0]["weights"]}


INTERLEAVED = {"pipeline_schedule": "interleaved", "pipeline_chunks": 2}
PIPELINES = [
    pytest.param("cpu", 2, {}, id="cpu"),
    pytest.param("cpu", 4, {"zero_1": True}, id="cpu, ZeRO-1"),
    pytest.param("xla", 2, {}, id="xla", marks=pytest.mark.xla),
    pytest.param("xla", 2, INTERLEAVED, id="xla, interleaved", marks=pytest.mark.xla),
]


@pytest.mark.prove
@pytest.mark.parametrize(("device", "nproc", "more"), PIPELINES)
def test_a_killed_pipeline_goes_on_bit_for_bit(
    ranks: Ranks, tmp_path: Path, device: str, nproc: int, more: dict[str, Any]
) -> None:
    """Killed in its first stage, and then in its last one; with dropout, whose numbers travel with hidden states."""
    case = {"device": device, "nproc": nproc // 2, "accumulation": 2, "workers": 0}
    pipeline = {"pipeline_parallel_size": 2, "layers": 4, **more}
    killed = {**options(case, tmp_path / "killed"), **pipeline}
    for step, rank in ((5, 0), (11, nproc - 1)):
        assert -9 in ranks.run(PROGRAM, {**killed, "kill_at": step, "kill_ranks": [rank]}, nproc=nproc).codes
    both = ranks.run(EACH, killed, {**options(case, tmp_path / "whole"), **pipeline}, nproc=nproc).check()
    resumed, undisturbed = zip(*both, strict=True)
    assert resumed[0]["resumed"] == [3, 9]
    assert resumed[0]["losses"] == undisturbed[0]["losses"]
    assert resumed[0]["evaluations"] == undisturbed[0]["evaluations"]
    assert [each["weights"] for each in resumed] == [each["weights"] for each in undisturbed]


def test_resuming_at_an_epochs_end_still_ends_the_epoch(ranks: Ranks, tmp_path: Path) -> None:
    """Killed between the save at an epoch's last step and the evaluation that the epoch's end asks for."""
    case = {"device": "cpu", "nproc": 1, "accumulation": 1, "workers": 0}
    steps = {"save_steps": 7, "max_steps": 9}  # 7 steps an epoch
    killed = {**options(case, tmp_path / "killed"), **steps}
    assert ranks.run(PROGRAM, {**killed, "kill_at_event": "on_epoch_end"}).codes == [-9]
    ((resumed, undisturbed),) = ranks.run(EACH, killed, {**options(case, tmp_path / "whole"), **steps}).check()
    assert resumed["resumed"] == [7]
    assert resumed["evaluations"] == undisturbed["evaluations"]
    assert resumed["weights"] == undisturbed["weights"]


def test_resuming_on_another_mesh_sees_every_sample_once(ranks: Ranks, tmp_path: Path) -> None:
    """One rank, then two with the same global batch, then one again: the losses of one rank throughout."""
    case = {"device": "cpu", "nproc": 1, "accumulation": 1, "workers": 0}
    plain = {**options(case, tmp_path / "whole"), "dropout": 0.0}
    moved = {**options(case, tmp_path / "moved"), "dropout": 0.0}
    ranks.run(PROGRAM, {**moved, "kill_at": 4})
    two = {**moved, "per_device_train_batch_size": 2, "kill_at": 10}
    ranks.run(PROGRAM, two, nproc=2)
    ((resumed, undisturbed),) = ranks.run(EACH, moved, plain).check()
    assert resumed["resumed"] == [3, 9]
    for step, (loss, norm) in undisturbed["losses"].items():
        assert resumed["losses"][step] == pytest.approx([loss, norm], rel=1e-5)
