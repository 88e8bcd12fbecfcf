"""What a save says is there is on the disk: every write is synced before anybody relies on it."""

from __future__ import annotations

import ast
import errno
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stepmark
from stepmark.checkpoint import Checkpointer
from stepmark.errors import FileRefused
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


SOURCE = Path(stepmark.__file__).parent
WRITERS = {  # beside filesystem/files.py: what writes, and into what that is no stranger's
    ("data/tokenize/token_cache.py", "open"): "the user's cache",
    ("launch/joining.py", "open"): "the null device",
    ("launch/step_board.py", "open"): "the supervisor's temporary folder",
    ("launch/step_board.py", "write_bytes"): "the same",
    ("launch/supervisor.py", "open"): "the supervisor's temporary folder",
    ("liveness/external_watchdog_process.py", "open"): "the same, under a random name that must not exist",
    ("preflight/drill/drill.py", "open"): "damages a checkpoint of its own run",
    ("preflight/drill/drilled_run.py", "open"): "what the ranks of its own runs print",
    ("report/page.py", "write_text"): "a device that --out names",
}


def writes(source: str) -> set[str]:
    """The names of calls that open a file for writing."""
    found = set()
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        given = [*call.args[:2], *(each.value for each in call.keywords if each.arg == "mode")]
        modes = [each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        flags = {node.attr for node in ast.walk(call) if isinstance(node, ast.Attribute)}
        if name in ("write_text", "write_bytes") or (
            name == "open"
            and (flags & {"O_CREAT", "O_TRUNC"} or any(re.fullmatch(r"[rbt]*[wax+][bt+]*", m) for m in modes))
        ):
            found.add(name)
    return found


def test_files_are_opened_for_writing_in_one_place() -> None:
    assert writes("open(a, 'w')") == writes("a.open('ab')") == writes("os.open(a, os.O_CREAT)") == {"open"}
    assert writes("open(a, mode='x')") == {"open"}
    assert writes("a.write_text(b)") == {"write_text"}
    assert writes("open(a)") == writes("a.open('rb')") == set()
    paths = {path.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*.py")}
    found = {(name, call) for name, path in paths.items() for call in writes(path.read_text())}
    assert found == {("filesystem/files.py", "open"), *WRITERS}


def linked(path: Path, target: Path) -> None:
    path.symlink_to(target)


def piped(path: Path, target: Path) -> None:
    os.mkfifo(path)


def foldered(path: Path, target: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [linked, piped, foldered])
def test_only_regular_files_are_read_or_appended_to(tmp_path: Path, make: Callable[[Path, Path], None]) -> None:
    path, own = tmp_path / "a.json", tmp_path / "own"
    own.write_text("mine")
    make(path, own)
    for refused in (files.read_file, files.open_for_appending):
        with pytest.raises(FileRefused, match=r"a\.json is a link that is not followed, or no regular file; remove it"):
            refused(path)
    assert own.read_text() == "mine"


def test_a_link_to_nothing_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    monkeypatch.setattr(time, "sleep", pytest.fail)
    with pytest.raises(FileNotFoundError):
        files.make_folder(tmp_path / "link")


def test_what_a_link_leads_to_is_neither_emptied_nor_replaced(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("mine")
    for name in ("a", "a.part"):
        (tmp_path / name).symlink_to(own)
    files.replace_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_text() == "new"
    assert not (tmp_path / "a").is_symlink()
    with pytest.raises(OSError, match="a.part"):
        files.write_file(tmp_path / "a.part", b"new")
    assert own.read_text() == "mine"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "a.part", "own"]


def test_a_file_with_another_name_is_copied_before_it_grows(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("mine\n")
    (tmp_path / "lines").hardlink_to(tmp_path / "own")
    with files.open_for_appending(tmp_path / "lines") as file:
        file.write(b"more\n")
    assert (tmp_path / "lines").read_text() == "mine\nmore\n"
    assert (tmp_path / "own").read_text() == "mine\n"


@pytest.mark.parametrize(("name", "most"), [("state.json", 128 << 20), ("used_recipe.yaml", 1 << 20)])
def test_a_file_has_a_largest_size(tmp_path: Path, name: str, most: int) -> None:
    with open(tmp_path / name, "wb") as file:
        file.truncate(most + 1)
    with pytest.raises(FileRefused, match=f"has {most + 1} bytes, more than the {most} of such a file"):
        files.read_file(tmp_path / name)
    os.truncate(tmp_path / name, most)
    files.open_for_reading(tmp_path / name).close()


def test_a_folder_that_cannot_be_made_is_an_error_of_the_system() -> None:
    with pytest.raises(FileNotFoundError):
        files.make_folder(Path("/proc/stepmark/run"))


def test_a_folder_of_ours_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".stepmark").symlink_to(tmp_path / "target")
    with pytest.raises(FileRefused, match="has to be a folder"):
        files.make_own_folder(tmp_path / "run" / ".stepmark")
    assert files.files_in(tmp_path / "run" / ".stepmark", "*") == []
    files.make_own_folder(tmp_path / "new" / ".stepmark")
    files.make_own_folder(tmp_path / "new" / ".stepmark")


def test_a_listed_file_that_cannot_be_opened_yet_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "late"
    path.write_text("here")
    tries: list[int] = []

    def read() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise FileNotFoundError(2, "No such file", str(path))
        return path.read_text()

    assert files.when_visible(read, path) == "here"
    assert len(tries) == 3


def test_a_file_that_is_not_listed_is_missing_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.time, "sleep", pytest.fail)
    with pytest.raises(FileNotFoundError):
        files.when_visible((tmp_path / "gone").read_text, tmp_path / "gone")
    assert not files._is_listed(tmp_path / "no-folder" / "gone")


def test_a_listed_file_is_not_tried_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "never"
    path.touch()

    def read() -> Any:
        raise FileNotFoundError(2, os.strerror(2), str(path))

    with pytest.raises(FileNotFoundError):
        files.when_visible(read, path, patience=0.3)
