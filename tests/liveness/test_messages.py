"""What ranks tell each other arrives as it was sent, runs nothing, and comes from a rank of the run."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepmark
from stepmark.errors import CheckpointDamaged, LaunchError, StepmarkError, UsageError
from stepmark.liveness.failure_report import SECRET
from stepmark.liveness.messages import names, pack, unpack
from tests.system.hostile.forge import Runs

SOURCE = Path(stepmark.__file__).parent
OBJECT_COLLECTIVES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
OF_FILES = ("checkpoint/single_file.py", "tensor_files/")  # where pickles are written for torch.load


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)


VALUES = [
    None,
    [1, 2.5, float("nan"), float("-inf"), "words", True, 1 << 80],
    {"a": (1, (2, [])), 3: b"\0\xff", None: {"$": "tuple"}},
    Path("runs/first"),
    [np.arange(6, dtype=np.int16).reshape(2, 3), np.float32(0.1), np.zeros(0)],
]


@pytest.mark.parametrize("value", VALUES, ids=["none", "list", "dict", "path", "arrays"])
@pytest.mark.parametrize("secret", ["", "words"])
def test_a_value_arrives_as_it_was(value: Any, secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, secret)
    found = unpack(pack(value))
    assert repr(found) == repr(value)
    assert type(found) is type(value)


@pytest.mark.parametrize("error", [StepmarkError("one"), CheckpointDamaged("two: three"), UsageError("")])
def test_an_error_arrives_with_its_kind(error: StepmarkError) -> None:
    found = unpack(pack(error))
    assert (type(found), str(found)) == (type(error), str(error))


def test_what_is_not_plain_is_refused_by_the_sender() -> None:
    with pytest.raises(UsageError, match="message"):
        pack({"a": object()})
    with pytest.raises(UsageError, match="message"):
        pack(np.array([object()]))


@pytest.mark.parametrize(
    "message",
    [b"", b"\0" * 7, b"\xff" * 40, pack({"a": 1})[:-1], pack(VALUES[4])[:-3], b"garbage" * 99],
    ids=["empty", "short", "ones", "cut", "cut-array", "garbage"],
)
def test_bytes_that_are_no_message_are_one_error(message: bytes) -> None:
    with pytest.raises(LaunchError, match="not of a rank of this run"):
        unpack(message)


@pytest.mark.parametrize("name", ["FileRefused:x", "os.system:true", "object", "7"])
def test_only_known_kinds_are_made(name: str) -> None:
    text = b'{"$": "tensor", "v": "%s"}' % name.encode()
    with pytest.raises(LaunchError):
        unpack(len(text).to_bytes(8, "little") + text)


def test_a_pickle_does_not_run(tmp_path: Path) -> None:
    canary = tmp_path / "ran"
    evil = pickle.dumps(Runs(f"open({str(canary)!r}, 'x')"))
    text = b'{"$": "tensor", "v": "ndarray"}'
    for message in (evil, len(text).to_bytes(8, "little") + text + evil):
        with pytest.raises(LaunchError, match="not of a rank of this run"):
            unpack(message)
    assert not canary.exists()


@pytest.mark.parametrize("theirs", ["", "guessed"])
def test_a_message_without_the_secret_is_refused(theirs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, theirs)
    forged = pack({"rank": 1})
    monkeypatch.setenv(SECRET, "of the run")
    with pytest.raises(LaunchError, match=SECRET):
        unpack(forged)
    changed = bytearray(pack({"rank": 1}))
    changed[-2] ^= 1
    with pytest.raises(LaunchError, match=SECRET):
        unpack(bytes(changed))


def test_names_do_not_tell_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    assert names() == ""
    monkeypatch.setenv(SECRET, "of the run")
    assert len(names()) == 64
    assert "of the run" not in names()


def test_no_object_collective_and_no_pickle_is_left_between_ranks() -> None:
    for path in SOURCE.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        called = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
        imported = {alias.name for node in imports for alias in node.names}
        assert not (called | imported) & OBJECT_COLLECTIVES, path
        assert "pickle" not in imported or path.relative_to(SOURCE).as_posix().startswith(OF_FILES), path
