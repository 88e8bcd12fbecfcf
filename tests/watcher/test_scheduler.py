"""How watchers divide the checkpoints of a run among them, and when they end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.coordination.leases import Lease
from stepmark.errors import CheckpointNotFound
from stepmark.watcher import scheduler
from stepmark.watcher.evaluation_data import Request
from stepmark.watcher.evaluation_records import EVALUATED, EvaluationRecords
from stepmark.watcher.scheduler import EvaluationJob, EvaluationScheduler


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that has ended, with three checkpoints."""
    with Checkpointer(tmp_path, keep_last=3) as checkpointer:
        for step in (5, 10, 15):
            checkpointer.save(step, {"nest": {}}, block=True)
    (tmp_path / "status.json").write_text(json.dumps({"state": "done", "step": 15}))
    return tmp_path


def begun(folder: Path, setup: str = "same", deleted_before: int = 0, **options: object) -> EvaluationScheduler:
    made = EvaluationScheduler(Request(folder, **{"watch": True, **options}), lambda _: None)  # type: ignore[arg-type]
    made.begin(EvaluationRecords(folder, setup), setup, deleted_before)
    MADE.append(made)
    return made


MADE: list[EvaluationScheduler] = []


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    while MADE:
        MADE.pop().release()


def do_all(folder: Path) -> None:
    """One watcher evaluates the three checkpoints."""
    watcher = begun(folder)
    for _ in range(3):
        tell(folder, watcher.look())
        watcher.release()


def tell(folder: Path, job: EvaluationJob, setup: str = "same") -> None:
    records = EvaluationRecords(folder, setup)
    assert job.found is not None
    with records.locked():
        records.add(job.found, EVALUATED, {"eval_loss": 1.0})


def step(job: EvaluationJob) -> int | None:
    return None if job.found is None else job.found.step


def test_two_watchers_take_different_checkpoints_and_wait_for_each_other(folder: Path) -> None:
    one, other = begun(folder), begun(folder)
    first, second = one.look(), other.look()
    assert (first.kind, step(first), second.kind, step(second)) == ("evaluate", 5, "evaluate", 10)
    tell(folder, first)
    one.release()
    third = one.look()
    assert step(third) == 15
    tell(folder, second)
    other.release()
    assert other.look().kind == "wait"  # 15 is not reported yet, and its watcher may die
    one.release()
    assert step(other.look()) == 15
    tell(folder, third)
    other.release()
    assert (one.look().kind, other.look().kind) == ("end", "end")


def test_another_setup_has_its_own_evaluations(folder: Path) -> None:
    first, second = begun(folder).look(), begun(folder, setup="another").look()
    assert (step(first), step(second)) == (5, 5)


def test_both_give_way_where_they_want_the_same_at_the_same_moment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "BACKOFF", 0.0)
    rivals: list[Lease] = []
    take: Callable[[Path, str], Lease | None] = Lease.take

    def take_together(path: Path, label: str) -> Lease | None:
        if not rivals:
            rivals.append(Lease(path, label))
        return take(path, label)

    monkeypatch.setattr(Lease, "take", take_together)
    assert step(begun(folder).look()) == 10
    rivals[0].release()
    assert len(list((folder / ".stepmark").glob("lease.checkpoint-5.*"))) == 0


def test_what_another_has_done_meanwhile_is_not_done_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = begun(folder), begun(folder)
    first = other.look()
    take: Callable[[Path, str], Lease | None] = Lease.take

    def take_late(path: Path, label: str) -> Lease | None:
        tell(folder, first)
        return take(path, label)

    other.release()
    monkeypatch.setattr(Lease, "take", take_late)
    assert step(one.look()) == 10


def test_what_retention_deleted_is_skipped_and_what_it_had_deleted_before_is_not(folder: Path) -> None:
    with Checkpointer(folder, keep_last=1) as checkpointer:
        checkpointer.save(20, {"nest": {}}, block=True)
    job = begun(folder, deleted_before=1).look()
    assert (job.kind, step(job)) == ("skip", 10)


def test_a_step_that_is_saved_again_is_evaluated_again(folder: Path) -> None:
    do_all(folder)
    assert begun(folder).look().kind == "end"
    shutil.rmtree(folder / "checkpoint-15")
    with Checkpointer(folder, keep_last=3) as checkpointer:
        checkpointer.save(15, {"nest": {}}, block=True)
    assert step(begun(folder).look()) == 15


@pytest.mark.parametrize(
    ("state", "until", "kind"),
    [
        ("done", None, "end"),
        ("interrupted", None, "end"),
        ("running", None, "wait"),  # no heartbeat, briefly
        ("interrupted", 20, "wait"),
        ("done", 20, "end"),
        ("interrupted", 15, "end"),
        ("interrupted", 12, "end"),
    ],
)
def test_when_a_watcher_ends(folder: Path, state: str, until: int | None, kind: str) -> None:
    (folder / "status.json").write_text(json.dumps({"state": state, "step": 15}))
    do_all(folder)
    assert begun(folder, until=until).look().kind == kind


def test_a_run_without_checkpoints(tmp_path: Path) -> None:
    said: list[str] = []
    assert EvaluationScheduler(Request(tmp_path, watch=True), said.append).look().kind == "wait"
    assert said == [f"waiting for the first checkpoint in {tmp_path}"]
    with pytest.raises(CheckpointNotFound, match="--watch waits for them"):
        EvaluationScheduler(Request(tmp_path), said.append).look()
