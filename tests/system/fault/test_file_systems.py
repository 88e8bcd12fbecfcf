"""File systems that are slow to answer, lose sight of a file, or keep one that was deleted: no checkpoint suffers."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.coordination.leases import Lease
from stepmark.checkpoint.format.verify import verify
from stepmark.errors import CheckpointBusy, CheckpointDamaged, CheckpointError
from stepmark.filesystem import files
from stepmark.liveness import heartbeat
from stepmark.liveness.heartbeat import lock_verdict
from stepmark.liveness.host_group import HostGroup
from tests.support.run_folders import checkpoint_names
from tests.system.distributed.checkpoint_world import run_ranks

PASSING = (errno.ETIMEDOUT, errno.ESTALE, errno.EMFILE, errno.EACCES, errno.ENOMEM)


def state_of(value: float = 0.0) -> dict[str, Any]:
    return {"nest": {"t": torch.full((300_000,), float(value)), "at": value}}


def save_two(folder: Path) -> Path:
    with Checkpointer(folder) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(step), block=True)
    return folder


def failing(call: Callable[..., Any], name: str, number: int) -> Callable[..., Any]:
    """The call, which fails for paths that end with `name`."""

    def wrapped(path: Any, *arguments: Any, **options: Any) -> Any:
        if str(path).endswith(name):
            raise OSError(number, os.strerror(number), str(path))
        return call(path, *arguments, **options)

    return wrapped


CALLS = {
    "manifest": ("manifest.json", os, "open"),
    "lstat": ("nest.safetensors", os, "lstat"),
    "header": ("nest.safetensors", Path, "open"),
    "open": ("nest.safetensors", os, "open"),
    "values": ("state.json", Path, "open"),
    "list": ("checkpoint-2", os, "listdir"),
}


@pytest.mark.parametrize("where", CALLS)
def test_a_transient_error_is_not_called_corruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    save_two(tmp_path)
    name, module, call = CALLS[where]
    for number in PASSING:
        state = state_of()
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.claim()
            with monkeypatch.context() as patch:
                patch.setattr(module, call, failing(getattr(module, call), name, number))
                with pytest.raises(CheckpointError, match=f"{name}.*{os.strerror(number)}.*try again") as caught:
                    checkpointer.restore(state)
                assert not isinstance(caught.value, CheckpointDamaged)
                if where in ("manifest", "lstat", "header"):  # what is looked at without reading tensors
                    with pytest.raises(CheckpointError, match="try again"):
                        checkpointer.latest()
                    with pytest.raises(CheckpointError, match="try again"):
                        verify(tmp_path / "checkpoint-2")
            assert checkpoint_names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
            assert checkpointer.restore(state) == 2


class Slow(io.FileIO):
    """A file of which a read gives 100 bytes at most, as a file system may."""

    def read(self, size: int | None = -1) -> bytes:
        return super().read(min(100, size if size is not None and size >= 0 else 100))

    def readinto(self, buffer: Any) -> int:
        return super().readinto(memoryview(buffer)[:100])


def test_a_header_that_takes_several_reads_is_not_called_corrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_two(tmp_path)
    usual = Path.open

    def short(path: Path, mode: str = "r", buffering: int = -1, **options: Any) -> Any:
        if path.suffix != ".safetensors":
            return usual(path, mode, buffering, **options)
        return Slow(path) if buffering == 0 else io.BufferedReader(Slow(path))

    monkeypatch.setattr(Path, "open", short)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(state_of()) == 2
    assert not verify(tmp_path / "checkpoint-2").faults


@pytest.mark.parametrize("where", ["manifest", "header", "open", "values"])
def test_what_the_disk_cannot_read_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    save_two(tmp_path)
    name, module, call = CALLS[where]
    name = f"checkpoint-2/{'state/' if 'nest' in name else ''}{name}"
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.claim()
        with monkeypatch.context() as patch:
            patch.setattr(module, call, failing(getattr(module, call), name, errno.EIO))
            assert checkpointer.restore(state_of()) == 1
    assert checkpoint_names(tmp_path) == ["checkpoint-1", "damaged-checkpoint-2"]


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOENT])
def test_what_one_rank_cannot_see_ends_the_restore_on_all(tmp_path: Path, number: int) -> None:
    """Rank 1 gets no answer, or misses a file that rank 0 sees."""
    save_two(tmp_path)
    for problem in run_ranks(2, restore_on_one_that_fails, str(tmp_path), number):
        assert "rank 1" in problem or os.strerror(number) in problem
        assert "try again" in problem
    assert checkpoint_names(tmp_path) == ["checkpoint-1", "checkpoint-2"]


def restore_on_one_that_fails(rank: int, folder: str, number: int) -> str:
    if rank == 1:
        os.open = failing(os.open, "checkpoint-2/state/nest.safetensors", number)
    with Checkpointer(folder, group=HostGroup.of_processes()) as checkpointer:
        with pytest.raises(CheckpointError) as caught:
            checkpointer.restore(state_of())
        assert not isinstance(caught.value, CheckpointDamaged)
    return str(caught.value)


def test_what_another_rank_misses_and_rank_0_too_is_damage(tmp_path: Path) -> None:
    """The file goes when rank 0 has looked."""
    save_two(tmp_path)
    assert run_ranks(2, restore_while_a_file_goes, str(tmp_path)) == [1, 1]
    assert checkpoint_names(tmp_path) == ["checkpoint-1", "damaged-checkpoint-2"]


def restore_while_a_file_goes(rank: int, folder: str) -> int | None:
    from stepmark.checkpoint.restore.tensor_reader import TensorReader

    fill = TensorReader.fill

    def late(self: TensorReader, *arguments: Any) -> None:
        path = Path(folder) / "checkpoint-2/state/nest.safetensors"
        if self.folder.name == "checkpoint-2" and rank == 1:
            path.unlink()
        elif self.folder.name == "checkpoint-2":
            return  # has read it before
        fill(self, *arguments)

    TensorReader.fill = late  # type: ignore[assignment, method-assign]
    with Checkpointer(folder, group=HostGroup.of_processes()) as checkpointer:
        return checkpointer.restore(state_of())


def test_a_copy_under_another_steps_name_is_not_that_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_two(tmp_path)
    shutil.copytree(tmp_path / "checkpoint-1", tmp_path / "checkpoint-10")
    shutil.copytree(tmp_path / "checkpoint-1", tmp_path / "the-first")
    assert [fault.problem for fault in verify(tmp_path / "checkpoint-10").faults] == [
        "is of step 1: the folder was copied or renamed; give it another name"
    ]
    assert not verify(tmp_path / "the-first").faults
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointDamaged, match="of step 1: the folder was copied"):
            checkpointer.restore(state_of(), 10)
        assert checkpointer.latest() == tmp_path / "checkpoint-2"
        assert checkpointer.restore(state_of()) == 2
        assert checkpointer.restore(state_of(), tmp_path / "the-first") == 1


class Sticky:
    """Takes the place of `os` in stepmark.filesystem.files: a file of that name is there again after it was deleted, as
    on NFS while somebody has it open."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def unlink(self, path: Any) -> None:
        if self._name not in str(path):
            os.unlink(path)


@pytest.fixture
def sticky(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "os", Sticky(".nfs0001"))


@pytest.mark.parametrize("name", [".deleted-checkpoint-0.ab-000001", ".stepmark/0000dead", ".stepmark/.0000dead"])
def test_a_leftover_that_cannot_go_yet_holds_up_no_run(
    tmp_path: Path, sticky: None, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    save_two(tmp_path)
    leftover = tmp_path / name
    leftover.mkdir()
    (leftover / ".nfs0001").touch()
    os.utime(leftover, (0, 0))
    for _ in range(2):
        with Checkpointer(tmp_path) as checkpointer:
            assert checkpointer.restore(state_of()) == 2
    assert "cannot be deleted" in caplog.text
    assert not (tmp_path / ".stepmark/0000dead").exists()  # its run, if it lives, sees that it has lost the folder


@pytest.mark.parametrize("exchange", [True, False])
def test_a_save_is_committed_though_the_old_one_cannot_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool, caplog: pytest.LogCaptureFixture
) -> None:
    save_two(tmp_path)
    (tmp_path / "checkpoint-2" / ".nfs0001").touch()
    if not exchange:
        monkeypatch.setattr(files, "exchange", lambda one, other: False)
    with monkeypatch.context() as patch, Checkpointer(tmp_path) as checkpointer:
        patch.setattr(files, "os", Sticky(".nfs0001"))
        checkpointer.save(2, state_of(5.0), block=True)
    assert "cannot be deleted" in caplog.text
    assert not list(tmp_path.glob(".replaced-*"))  # it would be taken for the checkpoint when that is gone
    state = state_of()
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(state) == 2
    assert state["nest"]["at"] == 5.0
    assert not list(tmp_path.glob(".*checkpoint*"))


def test_the_old_one_keeps_its_name_where_the_new_one_cannot_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_two(tmp_path)
    rename = files.rename

    def refuse(source: Path, target: Path) -> None:
        if source.name.startswith(".checkpoint-2."):
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(files, "exchange", lambda one, other: False)
    monkeypatch.setattr(files, "rename", refuse)
    state = state_of()
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointError, match="Input/output error"):
            checkpointer.save(2, state_of(5.0), block=True)
        assert checkpointer.latest() == tmp_path / "checkpoint-2"
        assert checkpointer.restore(state) == 2
    assert state["nest"]["at"] != 5.0


def test_what_retention_cannot_delete_yet_is_not_a_checkpoint(tmp_path: Path, sticky: None) -> None:
    save_two(tmp_path)
    (tmp_path / "checkpoint-1" / ".nfs0001").touch()
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        checkpointer.save(3, state_of(), block=True)
    assert [name for name in checkpoint_names(tmp_path) if not name.startswith(".")] == ["checkpoint-3"]


def test_a_read_only_file_is_synced_without_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an ordinary user cannot open it for writing; root could."""
    opened = []

    class Watched(Sticky):
        def open(self, path: Any, flags: int, *mode: int) -> int:
            opened.append((Path(path).name, flags & os.O_ACCMODE))
            return os.open(path, flags, *mode)

    def write(folder: Path) -> None:
        (folder / "vocab.json").write_text("{}")
        (folder / "vocab.json").chmod(0o444)

    monkeypatch.setattr(files, "os", Watched("-"))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state_of(), files=write, block=True)
    assert ("vocab.json", os.O_RDONLY) in opened
    assert not [flags for name, flags in opened if name == "vocab.json" and flags != os.O_RDONLY]


def test_a_folder_through_a_link_is_the_same_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with Checkpointer(tmp_path / "real") as checkpointer:
        checkpointer.claim()
        for _ in range(2):
            with pytest.raises(CheckpointBusy, match="in this process"):
                Checkpointer(tmp_path / "link").claim()
        assert locked_for_others(tmp_path / "real")
        checkpointer.save(1, state_of(), block=True)


def locked_for_others(folder: Path) -> bool:
    """Whether another process finds the heartbeats' locks held."""
    process = os.fork()
    if not process:
        heartbeat._alive_here.clear()
        verdicts = [lock_verdict(path) for path in folder.glob(".stepmark/[!.]*/alive.0")]
        os._exit(0 if verdicts == [True] else 1)
    return os.waitpid(process, 0)[1] == 0


def test_a_lock_of_another_mount_proves_no_death(tmp_path: Path) -> None:
    """Two containers of one machine have the same boot, and may each mount the file system for themselves."""
    path = tmp_path / "alive.0"
    own: dict[str, Any] = {"boot": heartbeat.boot_id(), "host": "here", "dev": tmp_path.stat().st_dev}
    path.write_text(json.dumps(own))
    assert lock_verdict(path) is False
    for other in ({**own, "dev": own["dev"] + 1}, {"boot": own["boot"], "host": "here"}):
        path.write_text(json.dumps(other))
        assert lock_verdict(path) is None
    lease = Lease(tmp_path / "checkpoint-1", "test")
    assert json.loads(lease.path.read_bytes())["dev"] == own["dev"]
    lease.release()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_folders_takes_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    class NoFolders(Sticky):
        errno = number

        def fsync(self, descriptor: int) -> None:
            if os.path.isdir(f"/proc/self/fd/{descriptor}"):
                raise OSError(self.errno, os.strerror(self.errno))
            os.fsync(descriptor)

    system = NoFolders("-")
    monkeypatch.setattr(files, "os", system)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state_of(), block=True)
        checkpointer.save(1, state_of(), block=True)
        system.errno = errno.EIO
        with pytest.raises(CheckpointError, match="Input/output error"):
            checkpointer.save(2, state_of(), block=True)


def test_a_worker_forked_during_a_save_keeps_no_file_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bytes] = []
    write_at = files.write_at

    def fork_and_write(descriptor: int, data: memoryview, offset: int) -> None:
        if len(data) > 1 << 19 and not found:
            found.append(files_of_a_fork(tmp_path))
        write_at(descriptor, data, offset)

    monkeypatch.setattr(files, "write_at", fork_and_write)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state_of(3.0), block=True)
        assert found == [b"[]"]
        assert locked_for_others(tmp_path)  # the fork has taken no lock away
        state = state_of()
        assert checkpointer.restore(state) == 1
        assert state["nest"]["at"] == 3.0


def files_of_a_fork(folder: Path) -> bytes:
    """Which files below the folder a forked process has open, though it closes what it knows of."""
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        os.write(writing, repr([link for link in links if str(folder) in link]).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(process, 0)
    with os.fdopen(reading, "rb") as pipe:
        return pipe.read()


def test_an_inherited_heartbeat_closes_nothing_else(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "checkpoint-1", "test")
    process = os.fork()
    if not process:
        mine = os.open(tmp_path / "mine", os.O_RDWR | os.O_CREAT)
        lease._heartbeat.stop()
        os.write(mine, b"still open")
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
    time.sleep(0.01)
    assert (tmp_path / "mine").read_bytes() == b"still open"
    lease.release()


def test_a_lease_that_cannot_be_removed_is_only_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_two(tmp_path)
    left = {"boot": heartbeat.boot_id(), "host": "here", "dev": tmp_path.stat().st_dev}
    (tmp_path / ".stepmark" / "lease.checkpoint-1.test.ab").write_text(json.dumps(left))

    class Refusing(Sticky):
        def unlink(self, path: Any) -> None:
            if "lease." in str(path):
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
            os.unlink(path)

    with caplog.at_level(logging.WARNING, logger="stepmark"), monkeypatch.context() as patch:
        patch.setattr(files, "os", Refusing("-"))
        with Checkpointer(tmp_path, keep_last=1) as checkpointer:
            checkpointer.save(3, state_of(), block=True)
    assert "a dead reader has left" in caplog.text
    assert checkpoint_names(tmp_path) == ["checkpoint-3"]


def test_the_folder_stays_claimed_when_the_run_itself_reads_it(tmp_path: Path) -> None:
    """As a callback does that uploads the folder: a lock of the process would be lost at the first close."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state_of(), block=True)
        checkpointer._background.join()
        for path in tmp_path.rglob("*"):
            if path.is_file():
                path.read_bytes()
        assert locked_for_others(tmp_path)
    assert not list(tmp_path.glob(".stepmark/[!.]*/alive.0"))


class Forgetful:
    """A mount of one rank that remembers a missing name for some seconds, as NFS and FUSE may: the folder lists what
    another rank has created, and looking at it or opening it still fails."""

    def __init__(self, folder: str, seconds: float) -> None:
        self._folder, self._seconds = folder, seconds
        self._missing: dict[str, float] = {}
        self.denied = 0

    def install(self) -> None:
        for module, name in ((os, "stat"), (os, "lstat"), (os, "open"), (Path, "open")):
            setattr(module, name, self._remembering(getattr(module, name)))

    def _remembering(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(path: Any, *arguments: Any, **options: Any) -> Any:
            name = str(path)
            if not name.startswith(self._folder):
                return call(path, *arguments, **options)
            creates = bool(arguments) and isinstance(arguments[0], int) and bool(arguments[0] & os.O_CREAT)
            if not creates and time.monotonic() < self._missing.get(name, 0.0):
                self.denied += os.path.basename(name) in os.listdir(os.path.dirname(name))
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
            try:
                return call(path, *arguments, **options)
            except FileNotFoundError:
                self._missing[name] = time.monotonic() + self._seconds
                raise

        return wrapped


def save_on_a_forgetful_mount(rank: int, folder: str) -> int:
    mount = Forgetful(f"{folder}/", 1.5)
    mount.install()
    with Checkpointer(folder, group=HostGroup.of_processes()) as checkpointer:
        for step in (1, 2):
            time.sleep(0.3 * (rank == step % 2))  # so that each rank waits for the other, and looks too early
            checkpointer.save(step, state_of(step), block=True)
    return mount.denied


def test_a_mount_that_remembers_missing_names_ends_no_save(tmp_path: Path) -> None:
    denied = run_ranks(2, save_on_a_forgetful_mount, str(tmp_path))
    assert sum(denied) > 0
    assert checkpoint_names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    assert not verify(tmp_path / "checkpoint-2").faults
