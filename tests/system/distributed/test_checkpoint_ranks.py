"""Real ranks save and restore together."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stepmark.checkpoint import Checkpointer, SaveHandle
from stepmark.checkpoint import checkpointer as checkpointer_module
from stepmark.checkpoint.host_memory import MACHINE
from stepmark.checkpoint.operation import Operation
from stepmark.checkpoint.restore.tensor_reader import TensorReader
from stepmark.checkpoint.save import background
from stepmark.checkpoint.save import write as saving
from stepmark.errors import CheckpointError, StepmarkError
from stepmark.filesystem import files
from stepmark.liveness import status_board
from stepmark.sharding.layout import Box, Layout, Part, Shard, TensorSlice
from tests.support.checkpoint_states import range_layout
from tests.system.distributed.checkpoint_world import RankError, join_ranks, run_ranks, start_ranks


def make(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(700, 900), nn.Linear(900, 500), nn.LayerNorm(500))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    return {"model": module, "optimizer": optimizer, "nest": {"step": 0, "t": torch.randn(3)}}


def step(state: dict[str, Any]) -> float:
    torch.manual_seed(0)
    loss = state["model"](torch.randn(8, 700)).square().mean()
    loss.backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    return float(loss.detach())


def save_and_go_on(rank: int, folder: Path) -> list[float]:
    state = make(0)
    step(state)
    with Checkpointer(folder) as checkpointer:
        for number in (1, 2):
            checkpointer.save(number, state, metadata={"rank": 0}, block=True)
    return [step(state), step(state)]


def restore_and_go_on(rank: int, folder: Path) -> list[float]:
    state = make(1)
    with Checkpointer(folder) as checkpointer:
        assert checkpointer.latest() == folder / "checkpoint-2"
        assert checkpointer.restore(state) == 2
    return [step(state), step(state)]


@pytest.mark.parametrize(("writers", "readers"), [(1, 3), (3, 2)])
def test_any_number_of_ranks_restores_what_any_other_saved(tmp_path: Path, writers: int, readers: int) -> None:
    expected = run_ranks(writers, save_and_go_on, tmp_path)
    found = run_ranks(readers, restore_and_go_on, tmp_path)
    assert expected == [expected[0]] * writers
    assert found == [expected[0]] * readers
    files = json.loads((tmp_path / "checkpoint-2" / "manifest.json").read_text())["files"]
    written = dict.fromkeys(range(writers), 0)
    for entry in files:
        begin = 0
        for rank, end in entry.get("writers", ()):
            written[rank] += end - begin
            begin = end
        assert "writers" not in entry or begin == entry["size"] - entry["header"]
    assert max(written.values()) - min(written.values()) <= 1 << 20
    assert not list(tmp_path.glob(".*checkpoint*"))


def shards(rank: int, size: int, seed: int) -> dict[str, Any]:
    """Tensors cut in every way: rows, columns, fused columns, ranges of a flat buffer, held by one rank, whole."""
    torch.manual_seed(seed)
    full = {name: torch.randn(12, 24) for name in ("rows", "columns", "fused", "flat", "whole")}
    n = 12 // size
    rows = full["rows"][rank * n : (rank + 1) * n].clone()
    m = 24 // size
    columns = full["columns"][:, rank * m : (rank + 1) * m].contiguous()
    third = 8 // size
    starts = [8 * part + rank * third for part in range(3)]
    fused = torch.cat([full["fused"][:, start : start + third] for start in starts], dim=1)
    fused_boxes = [(Box((0, start), (12, third)), (0, part * third)) for part, start in enumerate(starts)]
    cuts = [288 * r // size + (5 if 0 < r < size else 0) for r in range(size + 1)]
    buffer = torch.full((400,), -1.0)
    buffer[7 : 7 + cuts[rank + 1] - cuts[rank]] = full["flat"].view(-1)[cuts[rank] : cuts[rank + 1]]
    return {
        "rows": Shard(rows, Layout.box((12, 24), (rank * n, 0), (n, 24))),
        "columns": Shard(columns, Layout.box((12, 24), (0, rank * m), (12, m))),
        "fused": Shard(fused, Layout.boxes((12, 24), fused_boxes)),
        "flat": Shard(buffer, range_layout((12, 24), cuts[rank], cuts[rank + 1], at=7)),
        "whole": full["whole"],
    }


def save_shards(rank: int, size: int, folder: Path) -> None:
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, {"nest": shards(rank, size, 0)}, block=True)


def restore_shards(rank: int, size: int, folder: Path) -> None:
    live, expected = shards(rank, size, 1), shards(rank, size, 0)
    with Checkpointer(folder) as checkpointer:
        assert checkpointer.restore({"nest": dict(live)}) == 1
    for name, value in live.items():
        a = value.tensor if isinstance(value, Shard) else value
        b = expected[name].tensor if isinstance(value, Shard) else expected[name]
        assert torch.equal(a, b), name


@pytest.mark.parametrize(("writers", "readers"), [(2, 4), (4, 1)])
def test_shards_are_restored_on_another_mesh(tmp_path: Path, writers: int, readers: int) -> None:
    run_ranks(writers, save_shards, writers, tmp_path)
    run_ranks(readers, restore_shards, readers, tmp_path)


def differing_steps(rank: int, folder: Path) -> None:
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(rank, {"nest": {}})


def differing_values(rank: int, folder: Path) -> None:
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, {"nest": {"x": {"y": rank}}})


def differing_kinds(rank: int, folder: Path) -> None:
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, {"nest": {"x": {"y": (1, 2) if rank else {"a": 1}}}})


def failing_rank(rank: int, folder: Path) -> None:
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, {"nest": {"x": object() if rank else 1}})


def holes(rank: int, folder: Path) -> None:
    tensor_slice = Part(TensorSlice.of_range((8,), 0, 4), 0)
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, {"nest": {"t": Shard(torch.zeros(4), Layout((8,), (tensor_slice,)))}})


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (differing_steps, "ranks save different steps"),
        (differing_values, "ranks save different values: nest / x / y is 1 on rank 1 and 0 on one before it"),
        (differing_kinds, "nest / x / y is {'$': 'tuple', 'v': [1, 2]} on rank 1 and {'a': 1} on one before it"),
        (failing_rank, "rank 1: nest"),
        (holes, "the ranks' shards cover only 4 of 8"),
    ],
)
def test_what_ranks_cannot_save_together_fails_on_all(tmp_path: Path, function: Any, words: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, function, tmp_path, timeout=20)
    message = str(caught.value)
    assert message.count("Traceback") >= 2
    assert words in message
    assert not list(tmp_path.glob("*checkpoint*"))


def test_all_ranks_fall_back_together(tmp_path: Path) -> None:
    run_ranks(2, save_and_go_on, tmp_path)
    path = tmp_path / "checkpoint-2" / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(os.stat(path).st_size // 2)
        file.write(b"\xff\xff\xff\xff")
    assert run_ranks(2, restore_newest, tmp_path) == [1, 1]
    assert (tmp_path / "damaged-checkpoint-2").is_dir()


def stages(rank: int, size: int, seed: int) -> dict[str, Any]:
    """The layers that a pipeline stage holds, with the names they have in the whole model."""
    torch.manual_seed(seed)
    layers = {f"layer{i}": nn.Linear(8, 8) for i in range(4)}
    mine = nn.ModuleDict({name: layer for i, (name, layer) in enumerate(layers.items()) if i * size // 4 == rank})
    optimizer = torch.optim.SGD([{"params": list(mine.parameters()), "lr": 0.5}], momentum=0.9)
    for number, parameter in enumerate(mine.parameters()):
        parameter.grad = torch.full_like(parameter, float(number + seed))
    if seed == 0:
        optimizer.step()
    return {"model": mine, "optimizer": optimizer}


def save_stages(rank: int, size: int, folder: Path) -> None:
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, stages(rank, size, 0), block=True)


def missing_stage(rank: int, folder: Path) -> None:
    with Checkpointer(folder) as checkpointer:
        checkpointer.restore(stages(0, 2, 1))


def test_a_tensor_that_no_rank_takes_is_named(tmp_path: Path) -> None:
    run_ranks(2, save_stages, 2, tmp_path)
    with pytest.raises(RankError, match=r"unexpected tensor '.*layer2\.bias'"):
        run_ranks(2, missing_stage, tmp_path)


def save_alone(rank: int, folder: Path, seed: int) -> None:
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, make(seed), block=True)


def restore_from_folders(rank: int, folder: Path) -> str:
    """Each rank from one of its own, as with nodes that have different file systems at the same place."""
    path, state = folder / f"of-rank-{rank}" / "checkpoint-1", make(7)
    before = {name: tensor.clone() for name, tensor in state["model"].state_dict().items()}
    with Checkpointer(folder / "run") as checkpointer, pytest.raises(CheckpointError) as caught:
        checkpointer.restore(state, path)
    assert all(tensor.equal(before[name]) for name, tensor in state["model"].state_dict().items())
    return str(caught.value)


@pytest.mark.parametrize("damaged", [False, True])
def test_ranks_that_see_different_checkpoints_restore_neither(tmp_path: Path, damaged: bool) -> None:
    for rank in range(2):
        run_ranks(1, save_alone, tmp_path / f"of-rank-{rank}", rank)
    if damaged:  # what is wrong with the one says nothing about the other
        (tmp_path / "of-rank-1" / "checkpoint-1" / "state.json").write_text("")
    for message in run_ranks(2, restore_from_folders, tmp_path):
        assert "ranks 0 and 1 see different checkpoints" in message


def full_disk_on_one_rank(rank: int, folder: Path) -> str:
    from stepmark.errors import CheckpointError
    from stepmark.filesystem import files

    background.FAREWELL = 0.5
    state = make(0)
    write = files.write_at
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, state, block=True)
        if rank == 1:

            def full(descriptor: int, data: memoryview, offset: int) -> None:
                if len(data) > 1 << 20:
                    raise OSError(28, "No space left on device")
                write(descriptor, data, offset)

            files.write_at = full
        checkpointer.save(2, state)
        try:
            checkpointer.wait()
            message = "saved"
        except CheckpointError as error:
            message = str(error)
        files.write_at = write
        checkpointer.save(3, state, block=True)
    return message


def test_a_disk_that_fills_on_one_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    messages = run_ranks(2, full_disk_on_one_rank, tmp_path)
    assert messages[0].startswith("step 2 was not saved: rank 1: No space left on device")
    assert messages[1].startswith("step 2 was not saved: No space left on device")
    assert sorted(path.name for path in tmp_path.glob("*checkpoint*")) == ["checkpoint-1", "checkpoint-3"]


def die_in_a_save(rank: int, folder: Path, dies: int, phase: str) -> str:
    """No deadline passes in the test."""
    status_board._SILENT = 0.5
    state = make(0)
    enter = Operation.enter

    def enter_and_die(self: Operation, name: str) -> None:
        enter(self, name)
        if rank == dies and name == phase and "step 2" in self.what:
            os.kill(os.getpid(), signal.SIGKILL)

    Operation.enter = enter_and_die
    try:
        with Checkpointer(folder, save_timeout=600) as checkpointer:
            checkpointer.save(1, state, block=True)
            checkpointer.save(2, state, block=True)
    except StepmarkError as error:
        return str(error)
    return "saved"


def lose_a_rank_in_an_own_loop(rank: int, folder: Path, ending: str) -> str:
    """The collective is the script's own, as of its gradients."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
    try:
        with Checkpointer(folder) as checkpointer:
            checkpointer.save(1, make(0), block=True)
            if rank == 1 and ending == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 1 and ending == "hangs":
                time.sleep(8)
            elif ending == "own":
                raise RuntimeError("of the script's own")
            dist.all_reduce(torch.ones(1), group=group)
    except (StepmarkError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize(
    ("ending", "culprit"), [("killed", "rank 1"), ("hangs", "that rank hangs"), ("own", "RuntimeError: of the")]
)
def test_a_script_with_its_own_loop_reads_which_rank_it_has_lost(tmp_path: Path, ending: str, culprit: str) -> None:
    told = run_ranks(3, lose_a_rank_in_an_own_loop, tmp_path, ending)
    for message in (told[0], told[2]):
        assert culprit in message
        assert message.startswith("RuntimeError" if ending == "own" else "PeerFailed")
        assert ".cc" not in message


@pytest.mark.parametrize(("dies", "phase"), [(1, "writing"), (2, "copying"), (0, "planning")])
def test_a_rank_that_is_killed_is_named_and_the_last_checkpoint_stands(tmp_path: Path, dies: int, phase: str) -> None:
    messages = run_ranks(3, die_in_a_save, tmp_path, dies, phase)
    assert messages.pop(dies) is None
    for told in messages:
        assert f"rank {dies}" in told
        assert "is gone" in told
    (left,) = run_ranks(1, restore_newest, tmp_path)
    assert left == 1
    assert sorted(path.name for path in tmp_path.glob("*checkpoint*")) == ["checkpoint-1"]


def stop_for_a_while_in_a_save(rank: int, folder: Path) -> str:
    """The others are silent too, and alive."""
    status_board._SILENT = 0.5
    state = make(0)
    with Checkpointer(folder, save_timeout=600) as checkpointer:
        if rank == 1:
            subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
            write_extents = saving.write_extents

            def stop_and_write(*arguments: Any, **named: Any) -> Any:
                signal.raise_signal(signal.SIGSTOP)
                return write_extents(*arguments, **named)

            saving.write_extents = stop_and_write
        return checkpointer.save(1, state, block=True).result().name


def test_a_rank_that_is_stopped_for_a_while_is_waited_for(tmp_path: Path) -> None:
    assert run_ranks(2, stop_for_a_while_in_a_save, tmp_path) == ["checkpoint-1", "checkpoint-1"]


def save_where_nothing_can_be_written(rank: int, folder: Path) -> str:
    """From its writing on, rank 1 sees a read-only file system, where it can post nothing."""
    background.FAREWELL = 0.5
    state = make(0)
    write = files.write_at

    def write_or_fail(descriptor: int, data: memoryview, offset: int) -> None:
        if rank == 1 and threading.current_thread() is not threading.main_thread():
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder))
        write(descriptor, data, offset)

    with Checkpointer(folder, save_timeout=600) as checkpointer:
        checkpointer.save(1, state, block=True)
        files.write_at = write_or_fail
        with pytest.raises(CheckpointError) as caught:
            checkpointer.save(2, state, block=True)
    return str(caught.value)


def test_a_rank_that_cannot_post_its_failure_tells_the_others(tmp_path: Path) -> None:
    messages = run_ranks(2, save_where_nothing_can_be_written, tmp_path)
    assert messages[0].startswith("step 2 was not saved: rank 1: Read-only file system")
    assert messages[1].startswith("step 2 was not saved: Read-only file system")


def restore_newest(rank: int, folder: Path) -> int | None:
    with Checkpointer(folder) as checkpointer:
        return checkpointer.restore(make(1))


def until(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def restore_slowly(rank: int, folder: Path) -> int | None:
    """Rank 1 begins to read once the run that the checkpoint is of has saved another."""
    until(folder / "saved")
    fill = TensorReader.fill

    def late(*arguments: Any) -> None:
        (folder / "reading").touch()
        until(folder / "saved-again")
        fill(*arguments)

    if rank == 1:
        TensorReader.fill = late
    with Checkpointer(folder / "mine") as checkpointer:
        return checkpointer.restore(make(1), folder / "theirs" / "checkpoint-1")


def test_a_live_run_keeps_the_checkpoint_that_others_restore_from(tmp_path: Path) -> None:
    ranks = start_ranks(2, restore_slowly, tmp_path)
    with Checkpointer(tmp_path / "theirs", keep_last=1) as theirs:
        theirs.save(1, make(0), block=True)
        (tmp_path / "saved").touch()
        until(tmp_path / "reading")
        theirs.save(2, make(0), block=True)
        theirs._background.join()
        (tmp_path / "saved-again").touch()
        assert join_ranks(ranks) == [1, 1]
        assert (tmp_path / "theirs" / "checkpoint-1").is_dir()
        theirs.save(3, make(0), block=True)
    assert [path.name for path in (tmp_path / "theirs").glob("checkpoint-*")] == ["checkpoint-3"]


def save_where_memory_is_short(rank: int, folder: Path) -> str:
    """Each rank copies half of 16 MiB; there is room for one of them."""
    checkpointer_module.free_host_memory = lambda: {MACHINE: (64 << 20) + (12 << 20)}
    with Checkpointer(folder) as checkpointer:
        with pytest.raises(CheckpointError) as caught:
            checkpointer.save(1, {"nest": {"tensor": torch.zeros(4 << 20)}})
        checkpointer_module.free_host_memory = lambda: {MACHINE: (64 << 20) + (17 << 20)}
        checkpointer.save(2, {"nest": {"tensor": torch.zeros(4 << 20)}}, block=True)
    return str(caught.value)


def test_the_ranks_of_a_node_need_their_memory_together(tmp_path: Path) -> None:
    for told in run_ranks(2, save_where_memory_is_short, tmp_path):
        assert "saving needs 16.8 MB more of host memory for the copies of the 2 ranks on this node" in told


def restore_after_trouble(rank: int, folder: Path) -> str:
    """Rank 0 has an error of its own to tell, of deleting old checkpoints for example."""
    state = {"nest": {"t": torch.zeros(3)}}
    with Checkpointer(folder, save_timeout=30) as checkpointer:
        checkpointer.save(1, state, block=True)
        if rank == 0:
            checkpointer._background.join()
            handle = SaveHandle(1)
            checkpointer._background._aftermaths.append(handle)
            handle.fail(CheckpointError("cannot delete checkpoint-0"))
        with pytest.raises(CheckpointError) as caught:  # at once: after `save_timeout` it would name a rank
            checkpointer.restore(state)
        assert checkpointer.restore(state) == 1
    return str(caught.value)


def test_an_error_of_one_rank_before_restoring_is_raised_on_all(tmp_path: Path) -> None:
    mine, others = run_ranks(2, restore_after_trouble, tmp_path)
    assert mine == "cannot delete checkpoint-0"
    assert others == "rank 0: cannot delete checkpoint-0"
