"""Checkpoints with random bytes changed, cut out or put in, signed again or not: good values or a clear error."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.format.manifest import parse_manifest
from stepmark.checkpoint.format.verify import verify
from stepmark.errors import CheckpointDamaged, CheckpointError
from stepmark.filesystem.json_values import decode
from tests.checkpoint.format.test_manifest import change_file, signed
from tests.support.checkpoint_states import same, seeded_state, snapshot

FILES = ["manifest.json", "state.json", "model.safetensors", "optimizer/optimizer.safetensors"]


def state_of(seed: int) -> dict[str, Any]:
    return seeded_state(seed, torch.nn.Linear(30, 5))


def values(state: dict[str, Any]) -> dict[str, Any]:
    return snapshot(state["model"], state["optimizer"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("run")
    state = state_of(1)
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, state)
    return folder / "checkpoint-1", values(state)


def changed(data: bytes, generator: random.Random) -> bytes:
    """Flipped, cut, repeated, doubled in nesting: one to three times. Always different from `data`."""
    result = bytearray(data)
    for _ in range(generator.randint(1, 3)):
        at, length = generator.randrange(len(result) + 1), generator.randint(1, 40)
        kind = generator.randrange(4)
        if kind == 0 and at < len(result):
            result[at] ^= 1 << generator.randrange(8)
        elif kind == 1:
            del result[at : at + length]
        elif kind == 2:
            result[at:at] = generator.choice([b"[" * 5000, b"9" * 400, b"-1", b"1e999", b"null", bytes(length), b'"'])
        else:
            result[at:at] = result[at : at + length]
    return bytes(result) if bytes(result) != data else data + b"x"


def try_one(saved: tuple[Path, dict[str, Any]], folder: Path, generator: random.Random) -> None:
    source, good = saved
    path = folder / "checkpoint-1"
    shutil.copytree(source, path)
    name = generator.choice(FILES)
    data = changed((path / name).read_bytes(), generator)
    sign = name != "manifest.json" and generator.random() < 0.5
    if sign:
        header = 8 + int.from_bytes(data[:8], "little") if name.endswith(".safetensors") else None
        change_file(path, name, data, None if header is None else min(header, len(data)))
    else:
        (path / name).write_bytes(data)
        assert any(name in fault.file for fault in verify(path).faults), name
    state = state_of(2)
    try:
        with Checkpointer(folder) as checkpointer:
            checkpointer.restore(state, 1)
    except CheckpointError as error:
        assert str(error)
    else:
        assert sign, "unsigned damage was restored"
        if name == "state.json":
            assert same(values(state)["module"], good["module"])  # the weights are not in that file
    shutil.rmtree(path)


def fuzz(saved: tuple[Path, dict[str, Any]], folder: Path, seconds: float, seed: int) -> int:
    count, deadline = 0, time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            try_one(saved, folder, random.Random(f"{seed}-{count}"))
        except BaseException as error:
            error.add_note(f"seed {seed}, number {count}")
            raise
        count += 1
    return count


def test_changed_bytes_for_a_moment(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    assert fuzz(saved, tmp_path, 4, seed=1) > 5


@pytest.mark.prove
def test_changed_bytes_for_long(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    count = fuzz(saved, tmp_path, float(os.environ.get("STEPMARK_FUZZ_SECONDS", "120")), seed)
    with capsys.disabled():
        print(f"\n{count} changed checkpoints, seed {seed}")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5) | st.just("$"), inner, max_size=4),
    max_leaves=15,
)
TAGS = ["tensor", "dict", "ordered", "tuple", "set", "frozenset", "float", "int", "complex", "bytes", "array", "scalar"]
TAGS += ["size", "dtype", "device", "what"]
TAGGED = st.builds(lambda tag, v, rest: {**rest, "$": tag, "v": v}, st.sampled_from(TAGS), JSON, st.just({}))


@settings(deadline=None)
@given(st.one_of(JSON, TAGGED, st.lists(TAGGED, max_size=3)))
def test_any_json_is_decoded_or_refused(value: Any) -> None:
    try:
        decode(value, lambda name: torch.zeros(1))
    except CheckpointError as error:
        assert str(error)


HOSTILE = [
    ["F32", [1 << 62, 4], 0],
    ["F32", [-1], 0],
    ["F32", [5, 30], 99],
    ["F32", [5, 30], -1],
    ["F32", [4, 30], [[0, [0, 0], [2, 30]], [0, [0, 0], [4, 30]]]],
    ["F32", [5, 30], [[0, [0, 0], [5, 30], 0, 200]]],
    ["F32", [5, 30], [[0, [-1, 0], [5, 30]]]],
    ["F32", [10] * 5000, 0],
    ["F32", [1 << 40] * 3, [[0, [0] * 3, [1, 1, 1]]]],
    [7, [5, 30], 0],
    "F32",
]


@pytest.mark.parametrize("entry", HOSTILE)
def test_a_hostile_tensor_is_refused(saved: tuple[Path, dict[str, Any]], entry: Any) -> None:
    body = json.loads((saved[0] / "manifest.json").read_text())
    body["tensors"]["model"]["weight"] = entry
    with pytest.raises(CheckpointDamaged):
        parse_manifest(signed(body))


def overlapping(body: dict[str, Any]) -> None:
    body["tensors"]["model"]["weight"][2] = [[0, [0, 0], [3, 30]], [0, [1, 0], [2, 30]]]


def deep(body: dict[str, Any]) -> None:
    value: Any = []
    for _ in range(400):
        value = [value]
    body["metadata"] = value


def doubled(body: dict[str, Any]) -> None:
    body["files"].append(body["files"][0])


def named_twice(body: dict[str, Any]) -> None:
    body["files"][1]["name"] = body["files"][0]["name"]


@pytest.mark.parametrize("change", [overlapping, deep, doubled, named_twice])
def test_a_hostile_manifest_is_refused_or_harmless(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path, change: Any
) -> None:
    source, good = saved
    shutil.copytree(source, tmp_path / "checkpoint-1")
    body = json.loads((source / "manifest.json").read_text())
    change(body)
    (tmp_path / "checkpoint-1" / "manifest.json").write_bytes(signed(body))
    state = state_of(2)
    try:
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.restore(state, 1)
    except CheckpointError:
        return
    assert same(values(state), good)
