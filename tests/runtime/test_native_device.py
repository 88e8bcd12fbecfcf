"""A native device (a PrivateUse1 backend), whose memory is closed and whose queue is behind, trains as the CPU does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Ranks

ON_CPU = "tests.support.programs:train"
PROGRAMS = "tests.support.native_programs"
ON_DEVICE = f"{PROGRAMS}:train"
LAG = 8_000  # microseconds an operation: seconds a step


def losses(result: dict[str, Any]) -> list[list[float]]:
    return [result["losses"][step] for step in sorted(result["losses"], key=int)]


def close(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for (loss, norm), (other_loss, other_norm) in zip(losses(ours), losses(theirs), strict=True):
        assert loss == pytest.approx(other_loss, rel=1e-6)
        assert norm == pytest.approx(other_norm, rel=1e-5)


@pytest.mark.parametrize("nproc", [1, 2])
def test_losses_are_those_of_the_cpu(native_ranks: Ranks, tmp_path: Path, nproc: int) -> None:
    options = {"max_steps": 8}
    theirs = native_ranks.run(ON_CPU, {**options, "device": "cpu", "output_dir": str(tmp_path / "cpu")}, nproc=nproc)
    ours = native_ranks.run(ON_DEVICE, {**options, "output_dir": str(tmp_path / "device")}, nproc=nproc)
    (result, *_), (other, *_) = ours.check(), theirs.check()
    close(result, other)
    assert result["device"]["kernels"] > 500
    assert result["device"]["hazard"] == 0


@pytest.mark.parametrize("nproc", [1, 2])
def test_resumes_bit_for_bit_with_the_queue_behind_at_every_save(
    native_ranks: Ranks, tmp_path: Path, nproc: int
) -> None:
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "logging_steps": 1}
    straight = native_ranks.run(ON_DEVICE, {**options, "output_dir": str(tmp_path / "straight")}, nproc=nproc)
    (expected, *_) = straight.check()
    folder = {"output_dir": str(tmp_path / "behind")}
    killed = native_ranks.run(ON_DEVICE, {**options, **folder, "kill_at": 3}, LAG, nproc=nproc)
    assert killed.codes == [-9] * nproc
    resumed = native_ranks.run(ON_DEVICE, {**options, **folder, "resume_from_checkpoint": True}, LAG, nproc=nproc)
    (result, *_) = resumed.check()
    assert result["resumed"] in ([1], [2])  # the kill may come before the second is on disk
    assert losses(result) == losses(expected)
    assert result["weights"] == expected["weights"]
    assert result["device"]["hazard"] == 0


def test_a_pipeline_draws_the_dropout_of_one_rank(native_ranks: Ranks, tmp_path: Path) -> None:
    """Here the device draws from the host's generator, as one that falls back to the CPU for random operations does."""
    options = {"max_steps": 4, "layers": 2, "gradient_accumulation_steps": 2}
    one = native_ranks.run(ON_DEVICE, {**options, "output_dir": str(tmp_path / "one")})
    pipeline = {**options, "pipeline_parallel_size": 2, "output_dir": str(tmp_path / "two")}
    two = native_ranks.run(ON_DEVICE, pipeline, nproc=2)
    close(two.check()[0], one.check()[0])


@pytest.mark.parametrize("nproc", [1, 2])
def test_what_draws_on_the_host_resumes_bit_for_bit(native_ranks: Ranks, tmp_path: Path, nproc: int) -> None:
    program = f"{PROGRAMS}:train_drawing_on_the_host"
    pipeline = {"layers": 2, "gradient_accumulation_steps": 2, "pipeline_parallel_size": nproc}
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "logging_steps": 1, **pipeline}
    expected = native_ranks.run(program, {**options, "output_dir": str(tmp_path / "straight")}, nproc=nproc).check()[0]
    folder = {"output_dir": str(tmp_path / "killed")}
    assert native_ranks.run(program, {**options, **folder, "kill_at": 3}, nproc=nproc).codes == [-9] * nproc
    resumed = native_ranks.run(program, {**options, **folder, "resume_from_checkpoint": True}, nproc=nproc)
    result = resumed.check()[0]
    assert losses(result) == losses(expected)
    assert result["weights"] == expected["weights"]
    one = native_ranks.run(program, {**options, "pipeline_parallel_size": 1, "output_dir": str(tmp_path / "one")})
    close(result, one.check()[0])


@pytest.mark.parametrize("zero_1", [False, True])
def test_a_device_without_fused_kernels_trains(native_ranks: Ranks, tmp_path: Path, zero_1: bool) -> None:
    options = {"max_steps": 8, "zero_1": zero_1}
    theirs = native_ranks.run(ON_CPU, {**options, "device": "cpu", "output_dir": str(tmp_path / "cpu")})
    given = {**options, "output_dir": str(tmp_path / "device")}
    ours = native_ranks.run(ON_DEVICE, given, 0, ["aten::_fused_adamw_", "aten::_fused_adamw_.tensor_lr"])
    close(ours.check()[0], theirs.check()[0])


def test_saves_are_pinned_and_tensors_that_share_memory_are_seen(native_ranks: Ranks, tmp_path: Path) -> None:
    (found,) = native_ranks.run(f"{PROGRAMS}:saves_and_aliases", str(tmp_path)).check()
    assert found["pinned"]
    assert found["held"] > 1
    assert found["restored"] == {"a": [*range(8)], "b": [*range(1, 9)]}


@pytest.mark.parametrize("writer", ["nobody", "data", "in place", "load_state_dict"])
def test_a_save_is_copied_beside_the_next_step(native_ranks: Ranks, tmp_path: Path, writer: str) -> None:
    """The host waits for nothing, a copy for the update before, the next update for the copy, and whoever writes in
    between gets other memory."""
    (found,) = native_ranks.run(f"{PROGRAMS}:saves_beside_training", str(tmp_path), writer).check()
    trained = 6 * 4  # each parameter with its step and two moments
    expected = {"later": trained, "waits": [[], []], "early": [False, False, False], "hazard": 0, "changed": True}
    assert found == {**expected, "restored": [True, True]}


def test_a_device_whose_allocator_cannot_copy_saves_as_before_copy_on_write(
    native_ranks: Ranks, tmp_path: Path
) -> None:
    """torch ends the process where it frees a tensor that such an allocator could not copy."""
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "logging_steps": 1}
    given = {**options, "output_dir": str(tmp_path / "device")}
    saved = native_ranks.run(ON_DEVICE, given, 0, ["copy_data"]).check()[0]
    shutil.rmtree(tmp_path / "device" / "checkpoint-4")
    shutil.rmtree(tmp_path / "device" / "checkpoint-3")
    resumed = native_ranks.run(ON_DEVICE, {**given, "resume_from_checkpoint": True}, 0, ["copy_data"]).check()[0]
    assert resumed["weights"] == saved["weights"]


def test_what_is_tried_draws_nothing_on_the_host_or_the_device(native_ranks: Ranks) -> None:
    (found,) = native_ranks.run(f"{PROGRAMS}:generators").check()
    assert found == {"kept": True}


def test_a_seed_is_that_of_torch(native_ranks: Ranks) -> None:
    (found,) = native_ranks.run(f"{PROGRAMS}:seeds").check()
    assert found == {"same": True, "several": True, "current": True}


def test_half_precision_where_the_device_has_it(native_ranks: Ranks, tmp_path: Path) -> None:
    options = {"max_steps": 4, "fp16": True, "output_dir": str(tmp_path / "there")}
    (found,) = native_ranks.run(ON_DEVICE, options).check()
    assert all(loss < 5 for loss, _ in losses(found))
    lacking = native_ranks.run(ON_DEVICE, {**options, "output_dir": str(tmp_path / "lacking")}, 0, ["aten::mm"])
    assert "DeviceError: fp16: simulated trains in bfloat16" in lacking.logs[0]
