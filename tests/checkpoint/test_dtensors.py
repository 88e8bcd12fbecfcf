"""What torch shards, Checkpointer saves and restores: on any ranks and meshes, bit for bit, in jobs of plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from stepmark.checkpoint import read_manifest
from stepmark.checkpoint.format.checkpoint_folders import checkpoints
from stepmark.checkpoint.format.integrity import read_values
from stepmark.checkpoint.sections import describe
from tests.support import dtensor_programs as programs
from tests.support.mesh_checkpoints import checksums
from tests.support.ranks import Ranks

SHORT = [("fsdp", 2), ("fsdp+tp", 4), ("fsdp", 3), ("plain", 1)]
LONG = [("fsdp", 2), ("fsdp", 3), ("fsdp", 2), ("plain", 1), ("hsdp", 4), ("fsdp", 3), ("twice", 4), ("few", 3)]


@pytest.mark.parametrize(
    ("chain", "ways"),
    [
        (SHORT, ["foreach", "muon"]),
        pytest.param([*LONG, *SHORT[1:]], ["foreach", "fused", "loop", "muon"], marks=pytest.mark.prove),
    ],
    ids=["short", "long"],
)
def test_a_state_passes_from_mesh_to_mesh_bit_for_bit(
    ranks: Ranks, tmp_path: Path, chain: list[tuple[str, int]], ways: list[str]
) -> None:
    saved, first = None, list[dict[str, str]]()
    for step, (kind, nproc) in enumerate(chain, start=1):
        arguments = (str(tmp_path / "run"), kind, ways, saved, step, 0 if saved else 3)
        gathered = ranks.run(programs.run, *arguments, nproc=nproc).check()
        found = [checksums(tmp_path / "run" / way / f"checkpoint-{step}") for way in ways]
        first, saved = first or found, step
        assert found == first
        for told in gathered[: nproc - (kind == "few")]:  # a rank outside the mesh gathers nothing
            assert told == found
    values = read_values(path := tmp_path / "run" / ways[0] / "checkpoint-1", read_manifest(path))
    assert values["model"]["class"] == "Model"


@pytest.mark.parametrize(("kind", "nproc", "way"), [("fsdp", 2, "foreach"), ("fsdp+tp", 4, "muon")])
def test_training_goes_on_as_if_nothing_had_happened(
    ranks: Ranks, tmp_path: Path, kind: str, nproc: int, way: str
) -> None:
    assert ranks.run(programs.resumed, str(tmp_path), kind, way, nproc=nproc).check() == [[True, True]] * nproc


@pytest.mark.parametrize("kind", ["fsdp", pytest.param("hsdp", marks=pytest.mark.prove)])
def test_values_are_those_of_the_call_whoever_writes_while_they_are_copied(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    """`fully_shard` keeps a second reference to each parameter's memory."""
    nproc = 2 if kind == "fsdp" else 4
    found = ranks.run(programs.saved_late, str(tmp_path / "run"), kind, nproc=nproc).check()
    for ways in zip(*found, strict=True):
        assert sum(waiting for _, waiting, _, _ in ways) >= 2 * 3 * 8  # halves of parameters and their two moments
        assert [each[2:] for each in ways] == [[ways[0][0] != "passes", True]] * nproc, ways


@pytest.mark.parametrize("calls", [1, 3])
def test_a_kill_during_a_save_leaves_the_checkpoint_before(ranks: Ranks, tmp_path: Path, calls: int) -> None:
    outcome = ranks.run(programs.killed, str(tmp_path / "run"), calls, nproc=2)
    assert outcome.codes[1] == -9
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-1"]
    before = checksums(tmp_path / "run" / "checkpoint-1")
    ranks.run(programs.again, str(tmp_path / "run"), nproc=3).check()
    assert checksums(tmp_path / "run" / "checkpoint-3") == before


def test_states_that_are_local_tensors_are_slices_of_their_parameters(ranks: Ranks, tmp_path: Path) -> None:
    for same, shape, slices in ranks.run(programs.local_states, str(tmp_path / "run"), nproc=2).check():
        assert same
        assert (shape, slices) == ([11, 7], 2)


def test_states_that_lose_the_stride_lie_as_their_parameters() -> None:
    """As results of torch 2.9 do; other versions keep it."""
    with programs.fake_ranks((2, 2), 1) as mesh:
        module = nn.Linear(3, 9)
        programs.tensor_parallel_and_sharded(module, mesh)
        optimizer = torch.optim.SGD(module.parameters())
        optimizer.state[module.weight]["momentum_buffer"] = module.weight.detach() * 2
        model, states = describe({"model": module, "optimizer": optimizer})
        assert states.entries["weight/momentum_buffer"].layout == model.entries["weight"].layout


def test_shards_that_nobody_can_tell_apart_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks.run(programs.flattened, str(tmp_path / "run"), nproc=2).check():
        assert told == ["model: FullyShardedDataParallel hides which rank has which values; use fully_shard"] * 2


def test_wherever_a_state_holds_a_dtensor(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(programs.everywhere, str(tmp_path / "run"), nproc=2).check():
        partial = found.pop("partial")
        assert partial.startswith("sums: tensor 'a' is a DTensor with the placement Partial(sum)")
        assert found.pop("shared memory") == [[1.0] * 4, [2.0] * 4]
        rows, columns = "(Shard(dim=0),)", "(Shard(dim=1),)"
        assert found == {
            **{name: [[2.0], rows] for name in ("parameter", "buffer", "made", "extra")},
            "nest": [[2.0], columns],
            "object": [[3.0], columns],
        }
