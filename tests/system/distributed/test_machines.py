"""Machines that share no folder: what each writes of a checkpoint goes to the run's bucket."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.places import verify_there
from stepmark.filesystem.objects import Bucket
from tests.support import machine_programs
from tests.support.buckets import Proxy, Request, failing_each_once, make_bucket, object_store
from tests.support.ranks import Ranks
from tests.support.two_nodes import available

pytestmark = pytest.mark.skipif(not available(), reason="needs the right to make namespaces")


@pytest.fixture(scope="module")
def store() -> Iterator[Proxy]:
    with object_store() as proxy:
        yield proxy


class Cluster:
    """Machines with the folder `here` each, and a bucket."""

    def __init__(self, ranks: Ranks, folder: Path, proxy: Proxy) -> None:
        self.address, self.here = f"{make_bucket(proxy)}/run", folder / "here"
        self._ranks, self._folder = ranks, folder
        self._variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        self._variables["STEPMARK_CACHE"] = str(self.here / "cache")

    def run(self, program: Any, machines: list[int], *arguments: Any) -> Any:
        given = str(self.here), machines, *arguments
        return self._ranks.run(program, *given, nproc=len(machines), environment=self._variables)

    def on(self, machine: int) -> Path:
        """What a machine sees as `here`."""
        return self._folder / f"machine-{machine}"

    def lose(self, machine: int) -> None:
        shutil.rmtree(self.on(machine))

    def saves(self) -> dict[str, set[str]]:
        """By checkpoint, what is there: the manifest, and folders of saves."""
        found: dict[str, set[str]] = {}
        for each in Bucket(self.address).objects():
            if each.name.startswith("checkpoint-"):
                checkpoint, inside, *_ = each.name.split("/")
                found.setdefault(checkpoint, set()).add(inside)
        return found


@pytest.fixture
def cluster(ranks: Ranks, tmp_path: Path, store: Proxy) -> Cluster:
    store.fault = lambda *_: None
    return Cluster(ranks, tmp_path, store)


def test_a_checkpoint_is_whole_in_the_bucket_and_read_on_any_machines(cluster: Cluster) -> None:
    """One rank alone and two together, one machine that has all of a folder, three, a new one first."""
    before, step = None, None
    for machines in ([0, 1, 1], [0, 0], [0, 1, 2], [3, 1]):
        told = cluster.run(machine_programs.save, machines, cluster.address, 3).check()
        assert {each["restored"] for each in told} == {step}, machines
        assert before is None or {each["digest"] for each in told} == {before}, machines
        before, step = told[0]["saved"], (step or 0) + 3
        assert {each["saved"] for each in told} == {before}
        assert all(each["newest"] == f"checkpoint-{step}" and each["metadata"] == {"step": step} for each in told)
        assert all(each["whole"] for each in told)
        for machine, each in zip(machines, told, strict=True):
            kept = [f"checkpoint-{step - 1}", f"checkpoint-{step}"] if machine == machines[0] else []
            assert each["left"] == kept, (machines, machine)
        saves = cluster.saves()
        assert sorted(saves) == sorted([f"checkpoint-{step - 1}", f"checkpoint-{step}"])
        assert all(len(inside) == 2 for inside in saves.values()), "a manifest, and the save that it names"
        assert [report.faults for report in verify_there(cluster.address)] == [(), ()]


def test_a_part_that_cannot_be_uploaded_is_named_and_the_checkpoint_before_stands(
    cluster: Cluster, store: Proxy
) -> None:
    written: list[str] = []

    def refuse(_: int, sent: Request) -> int | None:
        name = sent[1]
        if sent[0] == "PUT" and "checkpoint-2/" in name and "safetensors" in name:
            written.append(name)
            return 403
        return None

    store.fault = refuse
    told = cluster.run(machine_programs.save, [0, 1], cluster.address, 3).check()
    assert written
    for rank, each in enumerate(told):
        (error,) = each["errors"]
        assert error.startswith("step 2 was not saved: ")
        assert ("rank 1: " in error) is (rank == 0)
        assert "403" in error or "permission" in error.lower() or "refuse" in error
        assert each["newest"] == "checkpoint-3"
        assert each["unfinished"] == [], "a disk that was full would stay so"
    assert sorted(cluster.saves()) == ["checkpoint-1", "checkpoint-3"]
    assert [report.faults for report in verify_there(cluster.address)] == [(), ()]


@pytest.mark.parametrize("lost", [None, 0, 1])
def test_a_run_that_ended_before_the_manifest_was_uploaded(lost: int | None, cluster: Cluster, store: Proxy) -> None:
    """The first machine has it, and what the second has written is in the bucket: nothing is deleted there."""
    store.fault = lambda _, sent: 403 if sent[0] == "PUT" and "checkpoint-2/manifest" in sent[1] else None
    told = cluster.run(machine_programs.save, [0, 1], cluster.address, 2).check()
    assert all(len(each["errors"]) == 1 and each["newest"] == "checkpoint-2" for each in told)
    store.fault = lambda *_: None
    if lost is not None:
        cluster.lose(lost)
    goes_on = cluster.run(machine_programs.save, [0, 1], cluster.address, 1).check()
    if lost == 0:
        assert [each["restored"] for each in goes_on] == [1, 1]
    else:
        assert [(each["restored"], each["digest"]) for each in goes_on] == [(2, told[0]["saved"])] * 2
    assert all(len(inside) == 2 for inside in cluster.saves().values())


@pytest.mark.parametrize("fault", ["cut before", "cut after", "twice", 500, 503])
def test_any_request_may_fail(fault: str | int, cluster: Cluster, store: Proxy) -> None:
    """Each request of three saves with retention fails once, on either machine, and is repeated."""
    seen: set[Request] = set()
    store.fault = failing_each_once(fault, seen)
    told = cluster.run(machine_programs.save, [0, 1], cluster.address, 3).check()
    store.fault = lambda *_: None
    assert len(seen) > 15
    assert not any("errors" in each for each in told)
    assert [report.faults for report in verify_there(cluster.address)] == [(), ()]
    goes_on = cluster.run(machine_programs.save, [2, 0], cluster.address, 1).check()
    assert [(each["restored"], each["digest"]) for each in goes_on] == [(3, told[0]["saved"])] * 2
    assert all(len(inside) == 2 for inside in cluster.saves().values()), "nothing is left of what failed"


def test_a_checkpoint_whose_parts_are_gone_is_set_aside(cluster: Cluster, store: Proxy) -> None:
    """Another run has deleted there what the second machine had written; the first has the manifest."""
    store.fault = lambda _, sent: 403 if sent[0] == "PUT" and "checkpoint-2/manifest" in sent[1] else None
    cluster.run(machine_programs.save, [0, 1], cluster.address, 2, False).check()
    store.fault = lambda *_: None
    bucket = Bucket(cluster.address)
    bucket.delete([each.name for each in bucket.objects("checkpoint-2")])
    told = cluster.run(machine_programs.save, [0, 1], cluster.address, 2).check()
    assert [(each["restored"], each["newest"]) for each in told] == [(1, "checkpoint-3")] * 2
    assert [report.faults for report in verify_there(cluster.address)] == [(), ()]


@pytest.mark.parametrize("whose", ["another run's", "its own"])
def test_a_checkpoint_in_the_folder_of_the_second_machine(whose: str, cluster: Cluster) -> None:
    """It is kept if it is another run's, and else deleted as what a run has downloaded that was killed since."""
    cluster.run(machine_programs.save, [0, 1], cluster.address, 1).check()
    (path,) = cluster.on(0).rglob("checkpoint-1")
    there = cluster.on(1) / path.relative_to(cluster.on(0))
    if whose == "its own":
        shutil.copytree(path, there)
    else:
        with Checkpointer(there.parent) as checkpointer:
            checkpointer.save(1, {"w": torch.ones(3)}, block=True)
        kept = (there / "manifest.json").read_bytes()
    told = cluster.run(machine_programs.save, [0, 1], cluster.address, 1).check()
    assert {(each["restored"], each["newest"]) for each in told} == {(1, "checkpoint-2")}
    assert told[1]["left"] == ([] if whose == "its own" else ["left-checkpoint-1"])
    assert whose == "its own" or (there.with_name("left-checkpoint-1") / "manifest.json").read_bytes() == kept


def test_a_folder_that_cannot_be_claimed_on_one_machine_is_free_afterwards(cluster: Cluster) -> None:
    for error, *beside in cluster.run(machine_programs.claim_twice, [0, 1], cluster.address).check():
        assert error.startswith("rank 1: checkpoints cannot be written to ")
        assert beside == []
    cluster.on(1).joinpath("run").touch()
    options = {"output_dir": str(cluster.here / "run"), "mirror_to": cluster.address}
    failed = cluster.run(machine_programs.train, [0, 1], options, None)
    assert failed.codes == [1, 1]
    assert all("rank 1: checkpoints cannot be written to " in log for log in failed.logs)


def test_without_a_bucket_the_ranks_that_have_another_folder_are_named(cluster: Cluster) -> None:
    for program, *given in ((machine_programs.save, 1), (machine_programs.dcp_step,)):
        failed = cluster.run(program, [0, 1, 1], str(cluster.here / "run"), *given)
        assert failed.codes == [1, 1, 1]
        assert all("rank 1, 2 does not see what rank 0 writes to " in log for log in failed.logs)


def test_a_run_goes_back_to_a_checkpoint_that_one_machine_has(cluster: Cluster) -> None:
    train, run = machine_programs.train, cluster.here / "run"
    options = {"output_dir": str(run), "mirror_to": cluster.address, "zero_1": True, "max_steps": 4}
    first = cluster.run(train, [0, 1], options, None).check()
    options["resume_from_checkpoint"] = str(run / "checkpoint-2")
    again = cluster.run(train, [0, 1], options, None).check()
    assert again[0].pop("resumed")
    assert first[0].pop("resumed") == []
    assert again == first
    assert all(report.faults == () for report in verify_there(cluster.address))


def test_a_state_dict_is_saved_from_machines_with_caches_of_their_own(cluster: Cluster) -> None:
    address = f"{cluster.address}/checkpoint-7"
    assert cluster.run(machine_programs.dcp_step, [0, 1], address).check() == [True, True]
    assert cluster.run(machine_programs.dcp_step, [2, 3, 3], address).check() == [True, True, True]
    assert {name: len(inside) for name, inside in cluster.saves().items()} == {"checkpoint-7": 2}


OPTIONS: dict[str, dict[str, Any]] = {
    "zero_1": {"zero_1": True, "save_total_limit": 2},
    "fsdp": {"fsdp": "full_shard", "async_save": False},
    "the best model": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # so that it is an early one
        "load_best_model_at_end": True,
        "save_total_limit": 1,
    },
}


@pytest.mark.prove
def test_runs_that_are_killed_over_and_over(cluster: Cluster, record_property: Callable[[str, object], None]) -> None:
    """At random, both ranks or one, while parts of checkpoints are uploaded; half of the times a machine is lost with
    its folder, or the two are exchanged."""
    chance, train, killed = random.Random(7), machine_programs.train, Counter[str]()
    options = {"zero_1": True, "save_steps": 2, "save_total_limit": 2, "max_steps": 120, "eval_strategy": "steps"}
    options |= {"eval_steps": 20, "resume_from_checkpoint": True, "save_timeout": 30}
    none = [None, None]
    for run in range(2):
        alone = {**options, "output_dir": str(cluster.here / f"whole-{run}"), "seed": run}
        whole = cluster.run(train, [99, 99], alone, None, none).check()
        there = {**options, "output_dir": f"{cluster.address}-{run}", "seed": run}
        machines = [100 * run, 100 * run + 1]
        for attempt in range(10):
            victim, seconds = chance.choice(["rank 0", "rank 1", "both ranks"]), chance.uniform(0, 1.5)
            later = [seconds if victim in (f"rank {rank}", "both ranks") else None for rank in range(2)]
            codes = cluster.run(train, machines, there, None, later).codes
            if codes == [0, 0]:
                break
            assert -9 in codes
            killed[victim] += 1
            if chance.random() < 0.25:
                machines.reverse()
            elif chance.random() < 1 / 3:
                lost = chance.randrange(2)
                cluster.lose(machines[lost])
                machines[lost] = 100 * run + 10 + attempt
        told = cluster.run(train, machines, there, None, none).check()
        whole[0].pop("resumed")
        told[0].pop("resumed")
        assert told == whole, run
        assert all(report.faults == () for report in verify_there(f"{cluster.address}-{run}"))
    for name, times in killed.items():
        record_property(f"kills of {name}", times)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_run_goes_on_with_the_same_bits_whatever_machines_are_lost(options: dict[str, Any], cluster: Cluster) -> None:
    alone = {**options, "output_dir": str(cluster.here / "whole")}
    whole = cluster.run(machine_programs.train, [9, 9], alone, None).check()
    options = {**options, "output_dir": cluster.address, "resume_from_checkpoint": True}
    train = machine_programs.train
    assert cluster.run(train, [0, 1], options, 3).codes == [-9, -9]
    cluster.lose(0)
    assert cluster.run(train, [1, 2], options, 5).codes == [-9, -9]
    cluster.lose(1)
    cluster.lose(2)
    assert cluster.run(train, [3, 3], options, 7).codes == [-9, -9]
    told = cluster.run(train, [4, 3], options, None).check()
    assert told[0].pop("resumed")
    assert whole[0].pop("resumed") == []
    assert told == whole  # losses, evaluations, the final model, which has left nothing beside it
    assert not any(each["beside"] for each in told)
    bucket, (save,) = Bucket(cluster.address), cluster.saves()["checkpoint-8"] - {"manifest.json"}
    assert bucket.read(f"checkpoint-8/{save}/added.txt") == b"8"
    assert all(report.faults == () for report in verify_there(cluster.address))
    assert bucket.objects(".stepmark/model") == []
