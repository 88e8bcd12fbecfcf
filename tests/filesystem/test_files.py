"""What a save says is there is on the disk: every write is synced before anybody relies on it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stepmark.checkpoint import Checkpointer
from stepmark.filesystem import files


class Recorder:
    """Takes the place of `os` in stepmark.filesystem.files: knows what a loss of power would lose just now."""

    def __init__(self) -> None:
        self.written: set[str] = set()  # files with bytes that are not synced
        self.entered: set[str] = set()  # folders with entries that are not synced
        self.lost: dict[str, list[set[str]]] = {}  # what a loss of power would have lost, by the event
        self._paths: dict[int, str] = {}
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def note(self, event: str, folder: str, *endings: str) -> None:
        """What is not synced below a folder."""
        below = {path for path in self.written | self.entered if path.startswith(folder)}
        chosen = {path for path in below if path.endswith(endings)} if endings else below
        self.lost.setdefault(event, []).append({os.path.relpath(path, folder) for path in chosen})

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        with self._lock:
            if flags & os.O_CREAT and not os.path.exists(path):
                self.entered.add(os.path.dirname(path))
            descriptor = os.open(path, flags, mode)
            self._paths[descriptor] = str(path)
            return descriptor

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        with self._lock:
            self.written.add(self._paths[descriptor])
        return os.pwrite(descriptor, data, offset)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)
        with self._lock:
            self.written.discard(self._paths[descriptor])
            self.entered.discard(self._paths[descriptor])

    def mkdir(self, path: Any) -> None:
        os.mkdir(path)
        self.entered.add(os.path.dirname(path))

    def rename(self, source: Any, target: Any) -> None:
        name = os.path.basename(target)
        if name.startswith("written."):  # this rank has written its share
            self.note("written", str(Path(source).parents[3]), ".safetensors")
        if name.startswith("committed."):
            self.note("committed", str(Path(source).parents[3]))
        if name.startswith("checkpoint-"):
            self.note("renamed", str(source))
        os.rename(source, target)
        self.entered.update(map(os.path.dirname, (str(source), str(target))))

    def exchange(self, one: Path, other: Path) -> int:
        self.note("renamed", str(one))
        code = renameat2(one, other)
        self.entered.add(str(one.parent))
        return code

    def unlink(self, path: Any) -> None:
        folder = Path(path).parent
        if "checkpoint-" in folder.name:  # the first thing that goes of a checkpoint, or of what was one
            gone = str(folder.parent) in self.entered
            self.lost.setdefault("deleted", []).append({folder.name} if gone else set())
        os.unlink(path)


renameat2 = files._renameat2


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(files, "os", recorder)
    monkeypatch.setattr(files, "_renameat2", recorder.exchange)
    return recorder


@pytest.mark.parametrize("again", [False, True])
def test_nothing_is_relied_on_before_it_is_synced(tmp_path: Path, recorder: Recorder, again: bool) -> None:
    """A first save and one of a step that exists; then the first of three is deleted by retention."""
    state = {"model": torch.nn.Linear(700, 700), "nest": {"t": torch.ones(5)}}
    with Checkpointer(tmp_path, keep_last=2, max_file_size=1_000_000) as checkpointer:
        for step in (1, 1, 2) if again else (1, 2, 3):
            checkpointer.save(step, state, files=write_files, block=True)
    for event in ("written", "renamed", "committed", "deleted"):
        assert recorder.lost.get(event), f"no {event}"
        for lost in recorder.lost[event]:
            left = {path for path in lost if not path.startswith(".stepmark")}
            assert not left, (event, left)


def write_files(folder: Path) -> None:
    files.make_folder(folder / "templates")
    for name in ("config.json", "templates/chat.jinja"):
        files.write_file(folder / name, b"{}", durable=False)


@pytest.mark.parametrize("sync", [files.sync_file, files.sync_folder, files.make_folder])
def test_what_is_listed_and_cannot_be_opened_yet_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: Callable[[Path], None]
) -> None:
    path, denied = tmp_path / "late", []
    path.touch() if sync is files.sync_file else path.mkdir()

    def denying(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(name: Any, *arguments: Any, **options: Any) -> Any:
            if name == path and len(denied) < 2:
                denied.append(name)
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(name))
            return call(name, *arguments, **options)

        return wrapped

    for name in ("open", "stat"):
        monkeypatch.setattr(os, name, denying(getattr(os, name)))
    sync(path)
    assert len(denied) == 2
