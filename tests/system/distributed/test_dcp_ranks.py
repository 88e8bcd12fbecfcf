"""State dicts that several ranks save with `dcp.save`, and any number of ranks load: as torch's, bit for bit."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest

from stepmark.checkpoint.format.verify import verify
from stepmark.filesystem.objects import Bucket
from tests.support import dcp_programs
from tests.support.buckets import make_bucket, object_store
from tests.support.ranks import Ranks


@pytest.mark.parametrize("shard", [True, False], ids=["fully_shard", "replicas"])
def test_training_goes_on_as_with_torchs_functions(shard: bool, ranks: Ranks, tmp_path: Path) -> None:
    found = {}
    for whose in ("torchs", "ours"):
        folder = tmp_path / whose
        folder.mkdir()
        found[whose] = [
            ranks.run(dcp_programs.train, str(folder), whose, shard, 2, nproc=nproc).check() for nproc in (2, 3, 1)
        ]
    assert found["ours"] == found["torchs"]
    assert [results[0][0] for results in found["ours"]] == [2, 4, 6]
    assert sorted(path.name for path in (tmp_path / "ours").glob("*step*")) == ["step-2", "step-4", "step-6"]
    assert verify(tmp_path / "ours" / "step-4").faults == ()


def test_training_goes_on_from_a_bucket_as_from_a_folder(ranks: Ranks, tmp_path: Path) -> None:
    """Each time on an empty machine."""
    found = []
    with object_store() as proxy:
        variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        for place in (None, f"{make_bucket(proxy)}/run"):
            folder = tmp_path / str(place is None)
            folder.mkdir()
            for nproc in (2, 1):
                variables["STEPMARK_CACHE"] = str(folder / f"cache-{nproc}")
                job = ranks.run(
                    dcp_programs.train, str(folder), "ours", True, 2, place, nproc=nproc, environment=variables
                )
                found.append(job.check())
        assert found[2:] == found[:2]
        for step in (2, 4):
            saves = {each.name.split("/")[1] for each in Bucket(f"{place}/step-{step}").objects(f"checkpoint-{step}")}
            assert len(saves) == 2  # of which one is the manifest
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith("s3:")]


def test_values_that_differ_are_one_ranks(ranks: Ranks, tmp_path: Path) -> None:
    theirs, ours = (ranks.run(dcp_programs.differing, str(tmp_path), each, nproc=2) for each in ("torchs", "ours"))
    for whose, results in (("torchs", theirs.check()), ("ours", ours.check())):
        assert results[0] == results[1], whose
        one = results[0]
        assert len(one["large"]) == len(one["generator"]) == 1, whose
        assert one["seed"] in (0, 1), whose
        assert (one["rank-0"], one["rank-1"]) == ({"at": 0}, {"at": 1}), whose
        assert one["by rank"] == [[0, 0], [1, 1]], whose
    told = "generator, large, seed: ranks have different values, of which one is saved"
    assert [told in log for log in ours.logs] == [True, False]


def test_every_rank_is_told(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks.run(dcp_programs.refused, str(tmp_path), nproc=2).check():
        assert "save to one folder" in told["folder"]
        assert "odd" in told["value"]
        assert "tensor 'w' is F32 [2] on one rank and F32 [3] on another" in told["shape"]
        assert "state.w is a value on rank 1 and a tensor on one before it" in told["kind"]
        assert "model.w is a value on rank 1 and a tensor on one before it" in told["kind in the model"]
        assert "no 'v'" in told["name"]
        assert "CheckpointNotFound" in told["missing"]
    assert sorted(path.name for path in tmp_path.iterdir() if "store" not in path.name) == ["c"]


def test_some_of_the_ranks_save_together(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(dcp_programs.groups, str(tmp_path), nproc=3).check() == [[0], [[1, 1], 1, 2, 1], [[1, 1], 1, 2, 2]]


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
def test_a_killed_save_leaves_the_old_checkpoint_or_the_new(exchange: bool, ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(dcp_programs.killed_everywhere, str(tmp_path), exchange, nproc=1).check()[0]
    assert {after - before for before, after in pairwise(found)} == {0.0, 1.0}
    assert len(found) > 10
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_rank_that_is_killed_leaves_the_old_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(dcp_programs.save, str(tmp_path), 1.0, [0, 0], nproc=2).check()
    codes = ranks.run(dcp_programs.save, str(tmp_path), 2.0, [0, 4], nproc=2, timeout=60).codes
    assert codes[0] not in (0, None)
    assert dcp_programs.loaded(str(tmp_path)) == 1.0
    ranks.run(dcp_programs.save, str(tmp_path), 3.0, [0, 0], nproc=2).check()
    assert dcp_programs.loaded(str(tmp_path)) == 3.0
