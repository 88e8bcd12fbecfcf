"""stepmark.save and stepmark.load: torch's files, atomic, checked, and safe on lazy devices."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import random
import threading
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stepmark.checkpoint import single_file
from stepmark.checkpoint.single_file import load, save
from stepmark.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, UsageError
from stepmark.filesystem import files
from tests.support.checkpoint_states import net, same, train
from tests.support.ranks import Ranks


def state_of(module: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(module.parameters())
    train(module, optimizer, 1)
    shared = torch.arange(5.0)
    return {
        "model": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "list": [1, 2.5, None, (True, "x", b"y")],
        "ordered": OrderedDict(a=torch.zeros(0)),
        "shared": [shared, shared],
        "parameter": nn.Parameter(torch.ones(2)),
    }


def test_torch_reads_what_save_writes_and_the_reverse(tmp_path: Path) -> None:
    state = state_of(net(0))
    save(state, tmp_path / "ours.pt")
    torch.save(state, tmp_path / "theirs.pt")
    theirs = torch.load(tmp_path / "ours.pt", weights_only=True)
    ours = load(tmp_path / "theirs.pt")
    for found in (theirs, ours, load(tmp_path / "ours.pt", "cpu")):
        assert same(found, state)
        assert found["shared"][0].data_ptr() == found["shared"][1].data_ptr()
        assert found["model"]._metadata == state["model"]._metadata
        assert isinstance(found["parameter"], nn.Parameter)
    assert os.listdir(tmp_path) == ["ours.pt", "theirs.pt"] or sorted(os.listdir(tmp_path)) == ["ours.pt", "theirs.pt"]


def test_what_weights_only_refuses_is_not_written(tmp_path: Path) -> None:
    save({"x": 1}, tmp_path / "a.pt")
    for bad in ({"m": net(0)}, {"f": Path("x")}, {"n": np.float64(1.0)}):
        with pytest.raises(UsageError, match="would refuse"):
            save(bad, tmp_path / "a.pt")
    assert load(tmp_path / "a.pt") == {"x": 1}
    assert os.listdir(tmp_path) == ["a.pt"]


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"x": 1}, tmp_path / "a.pt")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for call in ("sync_file", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(files, call, full)
            with pytest.raises(CheckpointError, match="No space left"):
                save({"x": 2}, tmp_path / "a.pt")
        assert load(tmp_path / "a.pt") == {"x": 1}
    with pytest.raises(CheckpointError, match="was not saved"):
        save({"x": 2}, tmp_path / "nowhere" / "a.pt")
    assert os.listdir(tmp_path) == ["a.pt"]


KILLED = """
import os, signal, sys, torch
from stepmark.checkpoint import single_file
from stepmark.filesystem import files

files.sync_file = lambda path: os.kill(os.getpid(), signal.SIGKILL)
single_file.save({"x": torch.ones(1000)}, sys.argv[1])
"""


def test_a_save_that_is_killed_leaves_the_old_file(tmp_path: Path, ranks: Ranks) -> None:
    save({"x": 1}, tmp_path / "a.pt")
    assert ranks.script(KILLED, str(tmp_path / "a.pt")).returncode == -9
    assert load(tmp_path / "a.pt") == {"x": 1}
    save({"x": 2}, tmp_path / "a.pt")
    assert load(tmp_path / "a.pt") == {"x": 2}


def test_damage_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    save({"t": torch.arange(1000.0)}, path)
    good = path.read_bytes()
    generator = random.Random(0)
    position = good.index(torch.arange(1000.0).numpy().tobytes()) + 100
    for place in [position, *(generator.randrange(len(good)) for _ in range(60))]:
        data = bytearray(good)
        data[place] ^= 1
        path.write_bytes(data)
        try:
            found = load(path)
        except CheckpointDamaged as error:
            assert str(path) in str(error)
        else:  # in the padding, or in a date: nothing that is read
            assert place != position
            assert same(found, {"t": torch.arange(1000.0)})
    for length in (0, 1, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:length])
        with pytest.raises(CheckpointDamaged):
            load(path)
    with pytest.raises(CheckpointNotFound):
        load(tmp_path / "b.pt")


@pytest.mark.xla
def test_lazy_tensors_are_saved_as_they_will_be(tmp_path: Path) -> None:
    import torch_xla

    from stepmark.runtime.device import runtime_for

    device = torch_xla.device()
    weight = nn.Parameter(torch.arange(6.0).reshape(2, 3).to(device))
    pending = weight * 2
    state = {"w": weight, "again": weight, "pending": pending, "host": torch.ones(2)}
    compiled = runtime_for(device).counters()
    save(state, tmp_path / "a.pt")
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert compiled is not None
    assert found["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["pending"].tolist() == [[0, 2, 4], [6, 8, 10]]
    assert found["w"] is found["again"] or found["w"].data_ptr() == found["again"].data_ptr()
    assert found["w"].device.type == "cpu"
    on_device = load(tmp_path / "a.pt", "xla")
    assert {tensor.device.type for tensor in on_device.values()} == {"xla"}
    assert same(on_device["pending"], found["pending"])


def test_a_save_that_hangs_ends(tmp_path: Path) -> None:
    process = os.fork()
    if not process:
        log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 2)
        import time

        files.rename = lambda *_: time.sleep(60)  # type: ignore[assignment]
        save({"x": 1}, tmp_path / "a.pt", timeout=0.5)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 1
    assert "a.pt: rank 0 (writing) has not ended this within 0.5 s (timeout)" in (tmp_path / "log").read_text()


@pytest.mark.xla
def test_what_is_tied_on_a_lazy_device_is_written_once_and_loaded_tied(tmp_path: Path) -> None:
    import torch_xla

    device = torch_xla.device()
    first, second = nn.Linear(300, 300).to(device), nn.Linear(300, 300).to(device)
    second.weight = first.weight
    flat = torch.zeros(400, device=device)
    state = {
        "first": first.state_dict(),  # torch detaches: other objects, the same memory
        "second": second.state_dict(),
        "parts": [flat[:200], flat[200:]],
        "turned": first.weight.detach().t(),
    }
    save(state, tmp_path / "tied.pt")
    assert (tmp_path / "tied.pt").stat().st_size < 3 * 300 * 300 * 4
    for loaded in (load(tmp_path / "tied.pt"), load(tmp_path / "tied.pt", "xla")):
        weights = [loaded[name]["weight"] for name in ("first", "second")]
        assert same(weights[0].cpu(), first.weight.detach().cpu())
        assert same(loaded["turned"].cpu(), first.weight.detach().cpu().t())
        with torch.no_grad():
            weights[0].fill_(7.0)
            loaded["parts"][0].fill_(1.0)
        assert bool((weights[1] == 7.0).all())
        assert not bool((loaded["turned"] == 7.0).any())
        assert not bool(loaded["parts"][1].any())


STUCK = """
import contextlib, os, sys, time
from pathlib import Path
from stepmark.checkpoint import single_file
reading, writing = os.pipe()
if sys.argv[1] == "gone":
    os.close(reading)
else:
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writing, b"x" * 4096):
            pass
    os.set_blocking(writing, True)
os.dup2(writing, 2)
with single_file._deadline(Path("x.pt"), "writing", 0.2):
    time.sleep(60)
"""


@pytest.mark.parametrize("reader", ["gone", "asleep"])
def test_a_deadline_holds_if_standard_error_is_not_read(reader: str, ranks: Ranks) -> None:
    assert ranks.script(STUCK, reader, timeout=40).returncode == 1


def test_no_deadline_is_too_far_away(tmp_path: Path) -> None:
    save({"x": 1}, tmp_path / "a.pt", timeout=float("inf"))
    assert load(tmp_path / "a.pt", timeout=float("inf")) == {"x": 1}


def test_a_record_that_torch_takes_for_a_folder_is_damage(tmp_path: Path) -> None:
    """torch reads nothing of such a record, and leaves the tensor what its memory was."""
    path = tmp_path / "a.pt"
    save({"t": torch.arange(1000.0)}, path)
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        (place,) = (number for number, name in enumerate(archive.namelist()) if name.endswith("data/0"))
    entry = -1
    for _ in range(place + 1):
        entry = data.index(b"PK\x01\x02", entry + 1)
    data[entry + 38] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(CheckpointDamaged, match="data/0"):
        load(path)


def test_every_flipped_bit_of_a_directory_is_damage_or_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    state = {"t": torch.arange(100.0), "u": torch.ones(3)}
    save(state, path)
    good = path.read_bytes()
    start = good.index(b"PK\x01\x02")
    for position in range(start, len(good)):
        data = bytearray(good)
        data[position] ^= 1 << position % 8
        path.write_bytes(data)
        with contextlib.suppress(CheckpointDamaged):
            assert same(load(path), state), position


def test_views_that_differ_in_a_sign_only_are_saved_as_they_are(tmp_path: Path) -> None:
    x = torch.randn(20, dtype=torch.complex64)
    for state in ({"a": x[:5], "b": x[:5].conj()}, {"b": x[:5].conj(), "a": x[:5]}):
        save(state, tmp_path / "a.pt")
        loaded = load(tmp_path / "a.pt")
        assert loaded["a"].equal(x[:5])
        assert loaded["b"].equal(x[:5].conj().resolve_conj())


def test_a_file_with_other_objects_is_not_called_corrupted(tmp_path: Path) -> None:
    torch.save({"module": net(0)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        load(tmp_path / "a.pt")
    assert not isinstance(caught.value, CheckpointDamaged)


def test_what_torch_load_takes(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    save({"w": torch.arange(3.0)}, path)
    for options in ({"weights_only": True, "mmap": True}, {"map_location": {"cuda:0": "cpu"}}, {"mmap": False}):
        assert load(path, **options)["w"].tolist() == [0.0, 1.0, 2.0]  # type: ignore[arg-type]
    assert load(path, lambda storage, location: storage)["w"].tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(UsageError, match="^weights_only: files that stepmark.load reads run no code"):
        load(path, weights_only=False)
    with pytest.raises(UsageError, match="^path: stepmark.load takes the path of a file; for a BytesIO use torch.load"):
        load(io.BytesIO())  # type: ignore[arg-type]


def test_what_save_cannot_write_to_or_has_no_values_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="^path: stepmark.save takes the path of a file; for a BytesIO use torch.save"):
        save({"w": torch.ones(2)}, io.BytesIO())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the state has a tensor on the meta device, which has no values"):
        save({"w": torch.ones(2), "m": torch.empty(2, device="meta")}, tmp_path / "state.pt")
    assert not any(tmp_path.iterdir())


def test_what_cannot_be_pickled_is_refused(tmp_path: Path) -> None:
    for bad in ({"f": lambda: 0}, {"lock": threading.Lock()}):
        with pytest.raises(UsageError, match="cannot be saved"):
            save(bad, tmp_path / "a.pt")
    assert not os.listdir(tmp_path)


def test_a_rank_that_does_not_write_leaves_no_file(tmp_path: Path) -> None:
    save({"x": torch.ones(10)[:2]}, tmp_path / "a.pt", write=False)
    assert not os.listdir(tmp_path)


def test_a_link_stays_and_the_file_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    target, link, second = tmp_path / "disk" / "real.pt", tmp_path / "a.pt", tmp_path / "b.pt"
    link.symlink_to("disk/real.pt")
    second.symlink_to(link)
    for number, path in enumerate([link, second]):  # there is no file yet when the first one is saved
        before = target.stat().st_ino if target.exists() else None
        save({"x": number}, path)
        assert load(target) == {"x": number}
        assert target.stat().st_ino != before, "not replaced, but written over"
    assert os.readlink(link) == "disk/real.pt"
    assert os.readlink(second) == str(link)
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "b.pt", "disk"]
    assert os.listdir(tmp_path / "disk") == ["real.pt"]


def test_a_link_that_leads_nowhere_stays(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("no/such/folder")
    for name in ("loop", "gone"):
        with pytest.raises(CheckpointError, match=f"{name} was not saved"):
            save({"x": 1}, tmp_path / name)
        assert (tmp_path / name).is_symlink()


def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "folder").mkdir()
    before = {entry.name: entry.lstat().st_ino for entry in tmp_path.iterdir()}
    for name, words in (
        ("pipe", "pipe is not a regular file.*; use torch.save to write to it"),
        ("link", "link is not a regular file.*; use torch.save to write to it"),
        ("folder", "folder is a folder"),
    ):
        with pytest.raises(UsageError, match=words):
            save({"x": 1}, tmp_path / name)
    assert {entry.name: entry.lstat().st_ino for entry in tmp_path.iterdir()} == before


def test_files_without_sums_load(tmp_path: Path) -> None:
    state, path = {"a": torch.arange(999.0), "b": torch.ones(3)}, tmp_path / "a.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert load(path)["a"].equal(state["a"])
    with torch.serialization.skip_data():  # as consolidation once left them: sums of all but the tensors
        torch.save(state, path)
    assert set(load(path)) == {"a", "b"}
    with path.open("r+b") as file:
        file.truncate(3000)
    with pytest.raises(CheckpointDamaged):
        load(path)


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EACCES, errno.EIO])
def test_a_file_that_cannot_be_read_at_the_moment_is_not_called_corrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = tmp_path / "a.pt"
    torch.save({"t": torch.zeros(9)}, path)

    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(single_file.zipfile.ZipFile, "open", fail)
    with pytest.raises(CheckpointError, match=os.strerror(number)) as caught:
        load(path)
    assert isinstance(caught.value, CheckpointDamaged) == (number == errno.EIO)
