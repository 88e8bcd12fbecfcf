"""Metrics are those of a plain loop over the samples, on any device and number of ranks, of live models and of
checkpoints that another mesh has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import evaluation_programs
from tests.support.ranks import Ranks

PROGRAMS = "tests.support.evaluation_programs"
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
    results = ranks.run(f"{PROGRAMS}:evaluated", device, str(tmp_path), COUNTS, tp, nproc=nproc).check()
    for count, of_ranks in zip(COUNTS, zip(*results, strict=True), strict=True):
        expected = evaluation_programs.plain_loop(count)
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
    (in_run, *_) = ranks.run(f"{PROGRAMS}:train_and_save", device, str(tmp_path), options, nproc=nproc).check()
    for step in (2, 4):
        (beside,) = ranks.run(f"{PROGRAMS}:evaluate_checkpoint", "cpu", str(tmp_path / f"checkpoint-{step}")).check()
        tolerance = 1e-2 if "dtype" in options else 1e-5  # sums in bfloat16 depend on how they are divided
        assert beside == pytest.approx(in_run[str(step)], rel=tolerance)


@pytest.mark.parametrize(
    ("device", "nproc", "tp"),
    [
        case("cpu", 2, 1, PROVE),
        case("cpu", 2, 2),
        case("xla", 1, 1, XLA, PROVE),
        case("xla", 2, 1, XLA, PROVE),
        case("xla", 2, 2, XLA, PROVE),
    ],
)
def test_metrics_and_predictions_after_every_step_change_nothing(
    ranks: Ranks, tmp_path: Path, device: str, nproc: int, tp: int
) -> None:
    name = f"{PROGRAMS}:losses_and_graphs"
    quiet = ranks.run(name, device, str(tmp_path / "quiet"), False, tp, nproc=nproc).check()[0]
    busy = ranks.run(name, device, str(tmp_path / "busy"), True, tp, nproc=nproc).check()[0]
    assert busy["losses"] == quiet["losses"]
    assert len(busy["evaluations"]) == 4
    if device == "xla" and tp == 1:
        assert busy["compilations"] == quiet["compilations"] + 1


@pytest.mark.xla
def test_a_lazy_device_compiles_one_graph_for_all_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    (in_run,) = ranks.run(f"{PROGRAMS}:train_and_save", "cpu", str(tmp_path), {"max_steps": 6}).check()
    (found,) = ranks.run(f"{PROGRAMS}:several_checkpoints", "xla", str(tmp_path), [2, 4, 6]).check()
    assert [loss for loss, _ in found] == pytest.approx([in_run["2"], in_run["4"], in_run["6"]], rel=1e-5)
    assert [compiled for _, compiled in found] == [found[0][1]] * 3
