"""Expert parallel checkpoints of neuronx-distributed: experts and their optimizer's states are put together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepmark.cli.main import run
from stepmark.errors import CheckpointDamaged, CheckpointMismatch
from stepmark.interchange.neuron.key_value_layout import moves_of
from tests.interchange.test_import import check, refused, take
from tests.support.expert_checkpoints import DOWN, GATE_UP, expert_folder, expert_truth
from tests.support.foreign_checkpoints import Truth

EXPERT = f"model.layers.1.{GATE_UP}"


@pytest.mark.parametrize(
    ("tp", "ep", "dp", "xser"), [(2, 2, 4, False), (1, 3, 3, True), (2, 2, 2, True), (1, 2, 8, False)]
)
def test_both_optimizers_come_along(tp: int, ep: int, dp: int, xser: bool, tmp_path: Path) -> None:
    """Also padded: 3 experts of a rank over 2 or 4 data parallel ranks."""
    expected = expert_truth()
    out = take(expert_folder(tmp_path / "source", expected, tp=tp, ep=ep, dp=dp, xser=xser), tmp_path / "out")
    check(out, expected)
    members = json.loads((out / "state.json").read_text())["sections"]["optimizer"]["members"]
    assert members == {name: int("norm" in name) for name in expected.model}


def test_states_without_zero_are_of_some_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = expert_truth()
    source = expert_folder(tmp_path / "source", expected, zero=False)
    assert run(["import", str(source), str(tmp_path / "out"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["optimizer_parameters"] is None
    assert any("first expert parallel rank's experts only" in line for line in said["lost"])
    assert not (tmp_path / "out" / "optimizer").exists()


def test_master_weights_are_not_in_these_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = expert_truth()
    low = Truth({name: tensor.bfloat16() for name, tensor in drawn.model.items()}, drawn.moments)
    assert run(["import", str(expert_folder(tmp_path / "source", low)), str(tmp_path / "out"), "--json"]) == 0
    assert any("master weights" in line for line in json.loads(capsys.readouterr().out)["lost"])


def test_missing_part_of_an_expert(tmp_path: Path) -> None:
    """What all ranks have is in the first expert parallel rank's files; that is no place to look for experts."""
    source = expert_folder(tmp_path / "source", expert_truth(), xser=True)
    name = list(expert_truth().model).index(EXPERT)
    rank = source / "model" / "dp_rank_00_ep_rank_01_tp_rank_01_pp_rank_00.pt"
    (rank.with_name(f"{rank.name}.tensors") / f"tensor_{name}.pt").unlink()
    refused(source, tmp_path, CheckpointDamaged, rank.name, EXPERT)


def test_common_tensors_may_be_in_the_first_ranks_files_only(tmp_path: Path) -> None:
    expected = expert_truth()
    source = expert_folder(tmp_path / "source", expected, xser=True)
    for number, tensor in enumerate(expected.model.values()):
        for path in source.glob(f"model/*ep_rank_01*.tensors/tensor_{number}.pt") if tensor.dim() != 3 else ():
            path.unlink()
    check(take(source, tmp_path / "out"), expected)


def test_experts_without_a_gate() -> None:
    """Their up projection is one tensor, and not two halves."""
    name = "model.layers.0.mlp.expert_mlps.mlp_op.up_proj.weight"
    moves = moves_of(name, [(2, 4, 6), (2, 4, 6)], None)
    assert [(move.rank, move.dim, move.start, move.length, move.at) for move in moves] == [
        (0, 2, 0, 6, 0),
        (1, 2, 0, 6, 6),
    ]
    with pytest.raises(CheckpointMismatch, match="only weights"):
        moves_of(DOWN.replace("weight", "bias"), [(2, 4), (2, 4)], None)
