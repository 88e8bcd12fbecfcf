"""Host memory that saving and restoring take: used again, and bounded whatever the size of the state."""

from __future__ import annotations

import contextlib
import mmap
import re
import tracemalloc
import unittest.mock
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint import checkpointer as checkpointer_module
from stepmark.checkpoint import host_memory as staging
from stepmark.checkpoint.format import verified_file as checked
from stepmark.checkpoint.format.manifest import TensorEntry
from stepmark.checkpoint.format.tensor_file import StoredTensor
from stepmark.checkpoint.restore import tensor_reader as reader
from stepmark.checkpoint.save.snapshot import Copy, copy_to_host
from stepmark.checkpoint.sections import Entry
from stepmark.errors import CheckpointError
from stepmark.runtime.eager import EagerRuntime
from stepmark.sharding.layout import Box, Layout, Part, Shard, TensorSlice
from stepmark.sharding.views import narrow
from tests.sharding.test_layout import elements_of, numbers, shapes, slices
from tests.support.checkpoint_states import bits


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
    memory = checked.thread_memory

    def counted(purpose: str, size: int) -> memoryview:
        found = memory(purpose, size)
        blocks[id(found)] = len(found)
        return found

    monkeypatch.setattr(checked, "thread_memory", counted)
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


def test_resharding_needs_no_memory_beyond_the_threads_buffers(tmp_path: Path) -> None:
    full = torch.arange(2048 * 2048, dtype=torch.float32).view(2048, 2048)
    columns = Shard(torch.zeros(2048, 256), Layout.box((2048, 2048), (0, 512), (2048, 256)))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"nest": {"t": full}}, block=True)
        tracemalloc.start()
        try:
            assert checkpointer.restore({"nest": {"t": columns}}) == 1
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert torch.equal(columns.tensor, full[:, 512:768])
    assert peak < full.nbytes / 2


@st.composite
def stored_slices(draw: st.DrawFn, shape: tuple[int, ...]) -> list[TensorSlice]:
    """Ranges of boxes that make up a tensor."""
    halves = [Box.full(shape)]
    if shape:
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, shape[dim]))
        sides = [(0, cut), (cut, shape[dim] - cut)]
        halves = [
            Box((0,) * dim + (offset,) + (0,) * (len(shape) - dim - 1), (*shape[:dim], length, *shape[dim + 1 :]))
            for offset, length in sides
        ]
    found = []
    for box in halves:
        cuts = sorted(draw(st.lists(st.integers(0, box.numel), max_size=2)))
        found += [TensorSlice(box, start, stop) for start, stop in pairwise([0, *cuts, box.numel])]
    return found


class Stored:
    """A tensor file in memory; what is read from it is gone with the next read."""

    def __init__(self, tensor_slice: TensorSlice, shape: tuple[int, ...], size: int) -> None:
        self.data = torch.tensor(elements_of(numbers(shape), tensor_slice), dtype=torch.int32).numpy().tobytes()
        self.found = StoredTensor("t", "I32", shape, tensor_slice, 4 * size)
        self._memory = bytearray(len(self.data))

    def tensor(self, name: str, dtype: str, tensor_slice: TensorSlice) -> StoredTensor:
        return self.found

    def read(self, tensors: list[StoredTensor], begin: int, end: int) -> memoryview:
        (tensor,) = tensors
        assert tensor.begin <= begin < end <= tensor.end
        assert end - begin <= reader.BLOCK
        self._memory[:] = b"\xff" * len(self._memory)
        self._memory[: end - begin] = self.data[begin - tensor.begin : end - tensor.begin]
        return memoryview(self._memory)[: end - begin]


@given(st.data(), shapes, st.sampled_from([4, 8, 12, 28, 64, 1 << 20]))
def test_reading_block_by_block_gives_what_reading_at_once_would(
    data: st.DataObject, shape: tuple[int, ...], block: int
) -> None:
    """Whatever is stored, and whatever is wanted of it: every element once, in its place, and no other is touched."""
    stored = data.draw(stored_slices(shape))
    tensor_slice = data.draw(slices(shape))
    if tensor_slice.is_box and data.draw(st.booleans()):
        at = tuple(data.draw(st.integers(0, 2)) for _ in shape)
        around = tuple(a + length + 1 for a, length in zip(at, tensor_slice.box.lengths, strict=True))
        part, local = Part(tensor_slice, at), torch.full(around, -1, dtype=torch.int32)
        place = narrow(local, Box(at, tensor_slice.box.lengths))
    else:
        begin = data.draw(st.integers(0, 3))
        part, local = Part(tensor_slice, begin), torch.full((begin + tensor_slice.numel + 2,), -1, dtype=torch.int32)
        place = local[begin : begin + tensor_slice.numel]
    target = reader.ReadTarget("g", "t", Layout(shape, (part,)), "I32", local)
    target.host = local
    entry = TensorEntry("I32", shape, tuple(enumerate(stored)))
    files: Any = {index: Stored(own, shape, index) for index, own in entry.slices}
    with (
        unittest.mock.patch.object(reader, "BLOCK", block),
        contextlib.closing(reader.TensorReader(Path(), unittest.mock.Mock())) as reading,
    ):
        reading._files = files
        for job in reading._boxes(target, part, entry):
            job()
        reading._files = {}
    assert place.reshape(-1).tolist() == elements_of(numbers(shape), tensor_slice)
    assert int((local != -1).sum()) == tensor_slice.numel


def test_memory_is_reused_once_it_is_unreferenced() -> None:
    """Not while the tensor made of it is: a device may still be reading from that one."""
    memory = staging.BufferPool(limit=3 << 20)
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
    memory = staging.BufferPool(limit=3 << 20)
    for _ in range(2):
        lent = [memory.take(1 << 20) for _ in range(2)]
        del lent
    assert len(memory._idle) == 2
    memory.take(2 << 20)
    assert sum(idle.numel() for idle in memory._idle) <= 3 << 20


class Copied(TorchDispatchMode):
    """The bytes of the copies that torch makes of tensors."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            self.total += result.nbytes
        return result


@pytest.mark.parametrize(("start", "stop"), [(0, None), (7, 1001), (30, 31)])
def test_strided_tensors_are_copied_without_a_copy_between(start: int, stop: int | None) -> None:
    """Of which this rank may write a range only, and which may be a range themselves."""
    torch.manual_seed(0)
    images = torch.randn(6, 5, 7, 8).to(memory_format=torch.channels_last)
    matrix = torch.randn(64, 40, dtype=torch.complex64).t().conj()
    rows = Layout.box((90, 80), (10, 0), (32, 80))
    wholes = [(tensor, Layout.full(tensor.shape)) for tensor in (images, matrix)]
    for tensor, layout in [*wholes, (torch.randn(80, 32).t(), rows)]:
        assert not tensor.is_contiguous()
        entry = Entry("g", "t", tensor, layout, "C64" if tensor.is_complex() else "F32")
        end = tensor.numel() if stop is None else stop
        copies = [Copy(entry, layout.parts[0], start, end, 16)]
        memory = torch.zeros(tensor.nbytes + 16, dtype=torch.uint8)
        with Copied() as copied:
            copy_to_host(copies, memory, EagerRuntime(torch.device("cpu")), threads=2)
        size = tensor.element_size()
        written = memory[16 : 16 + (end - start) * size]
        assert written.numpy().tobytes() == bits(tensor.resolve_conj())[start * size : end * size]
        assert not memory[16 + len(written) :].any()
        assert copied.total == 0


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
    assert min(staging.free_host_memory().values()) == (3 << 20) + 1000
    assert staging.free_host_memory().keys() > {staging.MACHINE}
    (tmp_path / mount / "job" / limit).write_text("max\n")
    assert min(staging.free_host_memory().values()) > 1 << 30


def test_ranks_in_containers_of_their_own_share_the_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sees its container's control group as the root; two of them are in the first."""
    (tmp_path / "own").write_text("0::/\n")
    monkeypatch.setattr(staging, "_OWN_CGROUPS", tmp_path / "own")
    free = []
    for place in ("one", "one", "other"):
        monkeypatch.setattr(staging, "_CGROUP", tmp_path / place)
        (tmp_path / place).mkdir(exist_ok=True)
        for name, content in (("memory.max", 60 << 30), ("memory.current", 0), ("memory.stat", "anon 5")):
            (tmp_path / place / name).write_text(f"{content}\n")
        free.append(staging.free_host_memory() | {staging.MACHINE: 100 << 30})
    what = "its copy of the state", "the copies of the"
    assert staging.shortage([29 << 30, 29 << 30, 40 << 30], free, *what) is None
    for needs, told in (
        ([40, 40, 0], r"85\.9 GB .* the 2 ranks in one container or control group, and 64\.4 GB are free"),
        ([0, 0, 70], r"75\.2 GB .* for its copy of the state, and 64\.4 GB are free"),
        ([29, 29, 47], r"113 GB .* the 3 ranks on this node, and 107 GB are free"),
    ):
        assert re.match(told, staging.shortage([need << 30 for need in needs], free, *what) or "")


def test_a_copy_that_the_host_has_no_room_for_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there from the last save is not needed again."""
    monkeypatch.setattr(checkpointer_module, "free_host_memory", lambda: {staging.MACHINE: (64 << 20) + (12 << 20)})
    with Checkpointer(tmp_path) as checkpointer:
        small = {"nest": {"tensor": torch.zeros(2 << 20)}}
        checkpointer.save(1, small, block=True)
        monkeypatch.setattr(checkpointer_module, "free_host_memory", lambda: {staging.MACHINE: 0})
        checkpointer.save(2, small, block=True)
        large = {"nest": {"tensor": torch.zeros(8 << 20)}}
        with pytest.raises(CheckpointError, match="saving needs 25.2 MB more of host memory for its copy"):
            checkpointer.save(3, large)


class CudaRuntime:
    """Records what is registered; `code` is what registering returns."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.registered: dict[int, int] = {}
        self.tried: list[tuple[int, int]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.tried.append((size, flags))
        if self.code == 0:
            self.registered[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def test_cuda_locks_the_exact_size_until_nobody_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, size = CudaRuntime(0), 3 * mmap.PAGESIZE + 5
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    held = staging.StagingMemory()
    memory = held.take(size, pinned=True)
    assert runtime.registered == {memory.data_ptr(): size}
    assert held.take(size - 1, pinned=True) is memory
    reader = memory.numpy().data
    del memory
    held.release()
    assert runtime.registered  # a thread still reads it
    reader[size - 1] = 7
    del reader
    assert not runtime.registered


def test_memory_that_cannot_be_locked_is_taken_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime, kernels = CudaRuntime(2), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "zeros", lambda *_, **options: kernels.append(options))

    def refuse(*_: object, **options: object) -> None:
        assert options["pin_memory"]
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    memory = staging.StagingMemory().take(100, pinned=True)
    assert (memory.numel(), runtime.tried, kernels) == (100, [(100, 1)], [{"device": "cuda"}])
    assert "cannot be page-locked, so saves take longer: out of memory" in caplog.text
