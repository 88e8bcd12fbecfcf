"""Corruption is found and named, an older checkpoint is used; an existing step is never in danger."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.trainer_utils import get_last_checkpoint

from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.format.checkpoint_folders import checkpoints, step_of
from stepmark.checkpoint.format.dtypes import item_size
from stepmark.checkpoint.format.tensor_file import StoredTensor
from stepmark.checkpoint.format.verify import verify
from stepmark.errors import CheckpointBusy, CheckpointDamaged, CheckpointError
from stepmark.filesystem import files
from stepmark.sharding.layout import Layout, Shard
from tests.support.checkpoint_states import net, same, snapshot, train
from tests.support.corruption import flip_bit


def state_of(seed: int = 0) -> dict[str, Any]:
    module = net(seed)
    optimizer = torch.optim.AdamW(module.parameters())
    return {"model": module, "optimizer": optimizer, "nest": {"tensor": torch.randn(5), "at": seed}}


def values(state: dict[str, Any]) -> dict[str, Any]:
    nest = state["nest"]
    return {**snapshot(state["model"], state["optimizer"]), "t": nest["tensor"].clone(), "at": nest["at"]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[str, Any]]]:
    """A run with checkpoints 1 and 2, and what was in the state at each."""
    folder = tmp_path_factory.mktemp("run")
    state, known = state_of(), {}
    with Checkpointer(folder) as checkpointer:
        for step in (1, 2):
            train(state["model"], state["optimizer"], 2)
            state["nest"]["at"] = step
            checkpointer.save(step, state, files=lambda path: (path / "config.json").write_text('{"a": "long enough"}'))
            checkpointer.wait()
            known[step] = values(state)
    return folder, known


FILES = ["model.safetensors", "optimizer/optimizer.safetensors", "state/nest.safetensors", "state.json"]
FILES += ["manifest.json", "config.json"]


def places(name: str, size: int) -> list[int]:
    generator = random.Random(name)
    return sorted({0, 1, 7, 8, 9, size - 1, *(generator.randrange(size) for _ in range(5))})


def falls_back(folder: Path, known: dict[int, dict[str, Any]], caplog: pytest.LogCaptureFixture, *words: str) -> None:
    """Restoring takes checkpoint 1, reports the corruption of 2, and quarantines 2 unchanged."""
    before = sorted(files.regular_files(folder / "checkpoint-2"))
    state = state_of(5)
    caplog.clear()
    with caplog.at_level(logging.ERROR, logger="stepmark"), Checkpointer(folder) as checkpointer:
        assert checkpointer.restore(state) == 1
        assert same(values(state), known[1])
        assert "checkpoint-2 is corrupted" in caplog.text
        assert all(word in caplog.text for word in words), caplog.text
        assert sorted(files.regular_files(folder / "damaged-checkpoint-2")) == before
        assert get_last_checkpoint(str(folder)) == str(folder / "checkpoint-1")
        checkpointer.save(2, state)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_found_and_named(
    saved: tuple[Path, dict[int, dict[str, Any]]], tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    source, known = saved
    for number, position in enumerate(places(name, (source / "checkpoint-2" / name).stat().st_size)):
        folder = tmp_path / str(number)
        shutil.copytree(source, folder)
        flip_bit(folder / "checkpoint-2" / name, position)
        with pytest.raises(CheckpointDamaged, match=name), Checkpointer(folder) as checkpointer:
            checkpointer.restore(state_of(5), 2)
        falls_back(folder, known, caplog, name)


@pytest.mark.parametrize("where", [b"saved_offsets", b"DCP_VERSION", b'"pt"', b"  "])
def test_a_flipped_bit_that_only_other_readers_look_at_is_found(
    saved: tuple[Path, dict[int, dict[str, Any]]], tmp_path: Path, caplog: pytest.LogCaptureFixture, where: bytes
) -> None:
    """What transformers or torch.distributed.checkpoint read in a header, and the spaces that fill it."""
    source, known = saved
    shutil.copytree(source, tmp_path / "run")
    path = tmp_path / "run" / "checkpoint-2" / "model.safetensors"
    flip_bit(path, path.read_bytes().index(where) + 1)
    assert [fault.file for fault in verify(path.parent).faults] == [path.name]
    falls_back(tmp_path / "run", known, caplog, path.name)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_short_or_missing_is_found_and_named(
    saved: tuple[Path, dict[int, dict[str, Any]]], tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    source, known = saved
    size = (source / "checkpoint-2" / name).stat().st_size
    changes: list[Callable[[Path], Any]] = [Path.unlink, lambda path: path.write_bytes(path.read_bytes() + b" ")]
    for length in {0, 1, 8, size // 2, size - 1}:
        changes.append(lambda path, length=length: os.truncate(path, length))
    for number, change in enumerate(changes):
        folder = tmp_path / str(number)
        shutil.copytree(source, folder)
        change(folder / "checkpoint-2" / name)
        falls_back(folder, known, caplog, name)


@pytest.mark.parametrize("name", [*FILES[:4], "model-00002-of-00002.safetensors", "model.safetensors.index.json"])
def test_a_file_of_another_step_is_found(
    saved: tuple[Path, dict[int, dict[str, Any]]], tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Also one that others would read as the model."""
    source, known = saved
    folder = tmp_path / "run"
    shutil.copytree(source, folder)
    copied = name if name in FILES else "model.safetensors"
    shutil.copy(folder / "checkpoint-1" / copied, folder / "checkpoint-2" / name)
    assert [fault.file for fault in verify(folder / "checkpoint-2").faults] == [name]
    falls_back(folder, known, caplog, name, *(["does not belong"] if name not in FILES else []))


def test_what_a_callback_has_put_into_a_checkpoint_is_left_alone(
    saved: tuple[Path, dict[int, dict[str, Any]]], tmp_path: Path
) -> None:
    """As those do that save an adapter."""
    source, known = saved
    folder = tmp_path / "run"
    shutil.copytree(source, folder)
    (folder / "checkpoint-2/adapter_model").mkdir()
    for name in ("adapter_model.safetensors", "adapter_model/model.safetensors"):
        shutil.copy(folder / "checkpoint-1/model.safetensors", folder / "checkpoint-2" / name)
    assert not verify(folder / "checkpoint-2").faults
    state = state_of(5)
    with Checkpointer(folder) as checkpointer:
        assert checkpointer.restore(state) == 2
    assert same(values(state), known[2])
    assert (folder / "checkpoint-2/adapter_model.safetensors").exists()


def test_nothing_is_quarantined_if_no_checkpoint_is_complete(
    saved: tuple[Path, dict[int, dict[str, Any]]], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved[0], folder)
    for step in (1, 2):
        flip_bit(folder / f"checkpoint-{step}" / "model.safetensors", 5000)
    with Checkpointer(folder) as checkpointer:
        for _ in range(2):
            with pytest.raises(CheckpointDamaged, match="none of the 2 checkpoints"):
                checkpointer.restore(state_of(5))
        assert checkpointer.latest() == folder / "checkpoint-2"  # headers and sizes are right


def test_errors_name_corrupted_tensors_and_their_writers(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"nest": {"a": torch.zeros(100), "b": torch.ones(100)}}, block=True)
        path = tmp_path / "checkpoint-1" / "state" / "nest.safetensors"
        flip_bit(path, 4096 + 450)
        with pytest.raises(CheckpointDamaged, match="tensor 'b' does not match its checksum .* written by rank 0"):
            checkpointer.restore({"nest": {}}, 1)


CALLS = ["make_folder", "open_for_writing", "write_at", "sync", "close", "sync_folder", "rename", "exchange"]
CALLS += ["remove_tree", "remove_file"]


def failing_from(number: int, fail: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    """Makes `fail` happen instead of the call of that number, and instead of all after it."""
    lock, left = threading.Lock(), [number]

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            with lock:
                left[0] -= 1
                if left[0] < 0:
                    fail()
            return call(*arguments, **options)

        return wrapped

    for name in CALLS:
        patch.setattr(files, name, failing(getattr(files, name)))


def full() -> None:
    raise OSError(28, "No space left on device")


def save_again(folder: Path, number: int, fail: Callable[[], None], patch: pytest.MonkeyPatch) -> bool:
    """Saves step 2 with other values, failing from a call on; whether it was saved all the same."""
    checkpointer = Checkpointer(folder, keep_last=1)
    checkpointer.claim()
    with patch.context() as calls:
        failing_from(number, fail, calls)
        try:
            checkpointer.save(2, state_of(7), block=True)
            checkpointer.close()  # where deleting old ones failed, this says so
        except CheckpointError:
            return False
        finally:
            with contextlib.suppress(CheckpointError):
                checkpointer.close()
    return True


def save_and_die(folder: Path, number: int, fail: Callable[[], None], patch: pytest.MonkeyPatch) -> bool:
    """The same, and the process dies at that call."""
    process = os.fork()
    if not process:
        save_again(folder, number, lambda: os._exit(9), patch)
        os._exit(0)
    return os.waitpid(process, 0)[1] == 0


@pytest.mark.parametrize(
    ("attempt", "every"),
    [
        pytest.param(save_and_die, 19, id="killed"),
        pytest.param(save_and_die, 1, id="killed, every call", marks=pytest.mark.prove),
        pytest.param(save_again, 1, id="full", marks=pytest.mark.prove),
    ],
)
def test_saving_a_step_that_exists_never_endangers_it(
    saved: tuple[Path, dict[int, dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    attempt: Callable[..., bool],
    every: int,
) -> None:
    source, known = saved
    expected = values(state_of(7))
    outcomes, number, good = set(), 0, False
    while not good:
        folder = tmp_path / str(number)
        shutil.copytree(source, folder)
        good = attempt(folder, number, full, monkeypatch)
        fresh = state_of(9)
        with Checkpointer(folder) as again:
            assert again.restore(fresh) == 2
            found = "new" if same(values(fresh), expected) else "old"
            assert found == "new" or same(values(fresh), known[2])
            again.save(3, fresh)
        assert not list(folder.glob(".*checkpoint*"))
        outcomes.add((good, found))
        number += every
    assert number > 20
    assert outcomes == {(False, "old"), (False, "new"), (True, "new")}


def test_a_full_disk_gets_room_from_checkpoints_that_need_not_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a run is started again with a lower limit: what is not kept goes before the save, and no more."""
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(1, 5):
            checkpointer.save(step, state_of())
    room = 1

    def usage(path: object) -> object:
        free = 64 << 20 if len(list(tmp_path.glob("checkpoint-*"))) <= room else 1 << 20
        return shutil._ntuple_diskusage(1 << 30, (1 << 30) - free, free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with Checkpointer(tmp_path, keep_last=2) as checkpointer:
        with pytest.raises(
            CheckpointError, match=r"needs 16\.8 MB in .*, and 16\.8 MB to spare\), and 1.05 MB are free"
        ):
            checkpointer.save(5, state_of())
        assert [step_of(path) for path in checkpoints(tmp_path)] == [4, 3]
        room = 2
        checkpointer.save(5, state_of())
        assert checkpointer.restore(state_of()) == 5
    room = 0
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(CheckpointError, match="are free"):
        checkpointer.save(6, state_of())  # with no limit, nothing is deleted
    assert [step_of(path) for path in checkpoints(tmp_path)] == [5, 4]


def test_a_second_live_run_is_refused_and_a_dead_one_is_cleaned_up(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        Checkpointer(tmp_path).claim()
        (tmp_path / ".checkpoint-7.abc-000001").mkdir()
        os.write(writing, b"x")
        os.read(os.pipe()[0], 1)  # until it is killed
    os.read(reading, 1)
    try:
        with pytest.raises(CheckpointBusy, match="another run that is alive"):
            Checkpointer(tmp_path).save(1, {"nest": {}})
    finally:
        os.kill(process, 9)
        os.waitpid(process, 0)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"nest": {}})
        checkpointer.wait()
        with pytest.raises(CheckpointBusy, match="in this process"):
            Checkpointer(tmp_path).claim()
        checkpointer.save(2, {"nest": {}})
    assert sorted(path.name for path in tmp_path.iterdir() if "checkpoint" in path.name) == [
        "checkpoint-1",
        "checkpoint-2",
    ]


def test_a_tensor_that_begins_within_an_element_is_read_in_boxes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As no writer of ours lays out a file: three bytes, then float32 values over several blocks."""
    whole = torch.arange(2000 * 1000, dtype=torch.float32).view(2000, 1000)

    def by_name(tensors: Any) -> tuple[StoredTensor, ...]:
        found, begin = [], 0
        for name, dtype, shape, part in sorted(tensors, key=lambda each: each[0]):
            found.append(StoredTensor(name, dtype, shape, part, begin))
            begin += part.numel * item_size(dtype)
        return tuple(found)

    monkeypatch.setattr("stepmark.checkpoint.save.plan.order", by_name)
    state = {"nest": {"a": torch.arange(3, dtype=torch.uint8), "b": whole}}
    columns = Layout.box((2000, 1000), (0, 300), (2000, 400))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, block=True)
        part = torch.zeros(2000, 400)
        checkpointer.restore({"nest": {"a": torch.zeros(3, dtype=torch.uint8), "b": Shard(part, columns)}}, 1)
    assert torch.equal(part, whole[:, 300:700])
