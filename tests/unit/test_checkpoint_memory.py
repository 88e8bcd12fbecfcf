"""Host memory that saving and restoring take: used again, and bounded whatever the size of the state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stepmark.checkpoint import Checkpointer, checked, staging
from stepmark.checkpoint import checkpointer as checkpointer_module
from stepmark.errors import CheckpointError


def test_twenty_saves_take_their_memory_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    touched = staging._touched

    def counted(size: int) -> torch.Tensor:
        taken.append(size)
        return touched(size)

    monkeypatch.setattr(staging, "_touched", counted)
    state = {"nest": {f"t{i}": torch.ones(1 << 18) for i in range(8)}}
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        for step in range(20):
            state["nest"]["t0"] += 1
            checkpointer.save(step, state)
    assert len(taken) == 1
    assert taken[0] < 8 * (1 << 20) + (1 << 20)


@pytest.mark.parametrize("count", [4, 32])
def test_restoring_into_live_tensors_takes_the_same_memory_for_any_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Each reading thread has one block; nothing else is held for tensors that are contiguous host memory."""
    blocks: dict[int, int] = {}
    memory = checked.reading_memory

    def counted(size: int) -> memoryview:
        found = memory(size)
        blocks[id(found)] = len(found)
        return found

    monkeypatch.setattr(checked, "reading_memory", counted)
    made: list[Any] = []
    empty = torch.empty

    def noted(*arguments: Any, **options: Any) -> torch.Tensor:
        made.append(arguments)
        return empty(*arguments, **options)

    state = {"nest": {f"t{i}": torch.full((3 << 20,), float(i)) for i in range(count)}}
    with Checkpointer(tmp_path, threads=1) as checkpointer:
        checkpointer.save(1, state, block=True)
        for tensor in state["nest"].values():
            tensor.zero_()
        monkeypatch.setattr(torch, "empty", noted)
        assert checkpointer.restore(state) == 1
    assert all(torch.equal(tensor, torch.full((3 << 20,), float(i))) for i, tensor in enumerate(state["nest"].values()))
    assert made == []
    assert len(blocks) <= 2  # restoring uses twice as many threads as `threads`
    assert max(blocks.values()) <= checked.BLOCK + (3 << 20)


def test_memory_is_lent_again_when_nobody_holds_it() -> None:
    """Not while the tensor made of it is: a device may still be reading from that one."""
    memory = staging.LentMemory(limit=3 << 20)
    first = memory.take(1 << 20)
    place = first.data_ptr()
    held = first.view(torch.float32).view(512, 512)
    del first
    second = memory.take(1 << 20)
    assert second.data_ptr() != place
    held.fill_(1.5)
    second.zero_()
    assert torch.equal(held, torch.full((512, 512), 1.5))
    del held
    assert memory.take(1 << 20).data_ptr() == place


def test_memory_of_no_use_is_given_back() -> None:
    memory = staging.LentMemory(limit=3 << 20)
    for _ in range(2):
        lent = [memory.take(1 << 20) for _ in range(2)]
        del lent
    assert len(memory._idle) == 2
    memory.take(2 << 20)
    assert sum(idle.numel() for idle in memory._idle) <= 3 << 20


def test_all_threads_copy_what_a_single_copy_would(tmp_path: Path) -> None:
    """Long and short runs, strided sources, conjugates: the copy is the same bits whatever way it takes."""
    torch.manual_seed(0)
    state = {
        "nest": {
            "long": torch.randn(5 << 20),
            "strided": torch.randn(300, 200).t(),
            "conjugate": torch.randn(100, dtype=torch.complex64).conj(),
            "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
            "mask": torch.rand(1000) > 0.5,
            "empty": torch.zeros(0, 4),
        }
    }
    expected = {name: tensor.clone() for name, tensor in state["nest"].items()}
    with Checkpointer(tmp_path, threads=3) as checkpointer:
        checkpointer.save(1, state, block=True)
        fresh = {"nest": {name: torch.zeros_like(tensor.resolve_conj()) for name, tensor in expected.items()}}
        assert checkpointer.restore(fresh) == 1
    for name, tensor in fresh["nest"].items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    ("own", "mount", "fields"),
    [
        ("0::/job/step\n", "", ("memory.max", "memory.current", "inactive_file")),
        (
            "4:cpu,cpuacct:/x\n7:memory:/job/step\n",
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_the_limit_of_a_container_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, mount: str, fields: tuple[str, str, str]
) -> None:
    """Of a process's own group, and of those that this one is in; both versions of control groups."""
    limit, use, inactive = fields
    for folder, most, used in (("job", 5 << 20, 2 << 20), ("job/step", 1 << 40, 1 << 20)):
        place = tmp_path / mount / folder
        place.mkdir(parents=True, exist_ok=True)
        (place / limit).write_text(f"{most}\n")
        (place / use).write_text(f"{used}\n")
        (place / "memory.stat").write_text(f"anon 5\n{inactive} 1000\n")
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(staging, "_CGROUP", tmp_path)
    monkeypatch.setattr(staging, "_OWN_CGROUPS", tmp_path / "own")
    assert staging.free_host_memory() == (3 << 20) + 1000
    (tmp_path / mount / "job" / limit).write_text("max\n")
    assert (staging.free_host_memory() or 0) > 1 << 30


def test_a_copy_that_the_host_has_no_room_for_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there from the last save is not needed again."""
    monkeypatch.setattr(checkpointer_module, "free_host_memory", lambda: (64 << 20) + (12 << 20))
    with Checkpointer(tmp_path) as checkpointer:
        small = {"nest": {"tensor": torch.zeros(2 << 20)}}
        checkpointer.save(1, small, block=True)
        monkeypatch.setattr(checkpointer_module, "free_host_memory", lambda: 0)
        checkpointer.save(2, small, block=True)
        large = {"nest": {"tensor": torch.zeros(8 << 20)}}
        with pytest.raises(CheckpointError, match="saving needs 0.02 GiB more of host memory for its copy"):
            checkpointer.save(3, large)
