"""Random and malicious manifests, headers and values: a clear error, never a crash, a hang, or a path outside."""

from __future__ import annotations

import copy
import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.format.checksums import bytes_checksum
from stepmark.checkpoint.format.manifest import Manifest, parse_manifest, read_manifest
from stepmark.checkpoint.format.tensor_file import parse_header
from stepmark.checkpoint.format.verify import verify
from stepmark.errors import CheckpointDamaged, CheckpointError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, state_of(0), files=lambda path: (path / "config.json").write_text("{}"), block=True)
    return folder / "checkpoint-1"


def state_of(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    module = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(module.parameters())
    if seed == 0:
        module(torch.ones(3)).sum().backward()
        optimizer.step()
    return {"model": module, "optimizer": optimizer, "nest": {"t": torch.ones(2), "x": [1, (2.5, None)]}}


def signed(body: dict[str, Any]) -> bytes:
    """A manifest with this body and the right checksum."""
    rest = {key: value for key, value in body.items() if key != "digest"}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in rest.items())
    blank = "{\n" + lines + ',\n"digest": "' + "0" * 32 + '"\n}\n'
    return blank.replace("0" * 32 + '"\n}\n', bytes_checksum(blank.encode()) + '"\n}\n').encode()


JUNK = [None, True, -1, 0, 1, 1 << 62, 1 << 80, 1.5, "", "x", "../x", "/etc/passwd", [], [1], {}, {"a": 1}, [[0, 0, 0]]]


def places(value: Any) -> list[tuple[Any, Any]]:
    """All (container, key) in a nest."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found.append((value, key))
        found += places(item)
    return found


def mutate(value: Any, generator: random.Random) -> None:
    container, key = generator.choice(places(value))
    if generator.random() < 0.2:
        del container[key]
    else:
        container[key] = copy.deepcopy(generator.choice(JUNK))


def restore_or_refuse(folder: Path) -> None:
    """Restoring what is there either works or says what is wrong."""
    with Checkpointer(folder.parent) as checkpointer:
        try:
            checkpointer.restore(state_of(1), folder)
        except CheckpointError as error:
            assert str(error)
    try:
        verify(folder)
    except CheckpointError as error:
        assert "use a newer Stepmark" in str(error)


def test_signing_gives_what_we_write(saved: Path) -> None:
    data = (saved / "manifest.json").read_bytes()
    body = json.loads(data)
    assert parse_manifest(signed(body)) == parse_manifest(data)
    assert isinstance(parse_manifest(data), Manifest)


def change_file(folder: Path, name: str, data: bytes, header: int | None) -> None:
    """Puts other bytes into a file, and their size and checksum into the manifest."""
    (folder / name).write_bytes(data)
    body = json.loads((folder / "manifest.json").read_text())
    for entry in body["files"]:
        if entry["name"] == name:
            entry["size"] = len(data)
            entry["digest"] = bytes_checksum(data if header is None else data[:header])
            if header is not None:
                entry["header"] = header
    (folder / "manifest.json").write_bytes(signed(body))


def change_manifest(saved: Path, folder: Path, generator: random.Random) -> None:
    body = json.loads((saved / "manifest.json").read_text())
    for _ in range(generator.randint(1, 3)):
        mutate(body, generator)
    (folder / "manifest.json").write_bytes(signed(body))


def change_values(saved: Path, folder: Path, generator: random.Random) -> None:
    body = json.loads((saved / "state.json").read_text())
    mutate(body, generator)
    change_file(folder, "state.json", json.dumps(body).encode(), None)


def change_header(saved: Path, folder: Path, generator: random.Random) -> None:
    data = (saved / "model.safetensors").read_bytes()
    size = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:size])
    own = json.loads(header["__metadata__"]["stepmark"])
    mutate(generator.choice([header, own]), generator)
    if isinstance(header.get("__metadata__"), dict):
        header["__metadata__"]["stepmark"] = json.dumps(own)
    text = json.dumps(header).encode().ljust(size - 8)
    change_file(folder, "model.safetensors", struct.pack("<Q", len(text)) + text + data[size:], 8 + len(text))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("change", [change_manifest, change_values, change_header])
def test_right_checksums_and_wrong_contents(
    saved: Path, tmp_path: Path, change: Callable[[Path, Path, random.Random], None], seed: int
) -> None:
    generator = random.Random(seed)
    folder = tmp_path / "checkpoint-1"
    shutil.copytree(saved, folder)
    for _ in range(40):
        change(saved, folder, generator)
        restore_or_refuse(folder)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_bytes_are_refused_as_a_header(data: bytes, size: int) -> None:
    with pytest.raises(CheckpointDamaged):
        parse_header(data, size)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_as_a_manifest(data: bytes) -> None:
    with pytest.raises(CheckpointDamaged):
        parse_manifest(data)
    digest = b'"digest": "' + b"0" * 32 + b'"\n}\n'
    with pytest.raises(CheckpointError):
        parse_manifest((data + digest).replace(b"0" * 32, bytes_checksum(data + digest).encode()))


def unknown_tensor(folder: Path) -> None:
    body = json.loads((folder / "manifest.json").read_text())
    body["tensors"]["model"]["weight"][0] = "F4_NEW"
    (folder / "manifest.json").write_bytes(signed(body))


def unknown_value(value: dict[str, Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        body = json.loads((folder / "state.json").read_text())
        body["sections"]["nest"]["value"]["x"] = value
        change_file(folder, "state.json", json.dumps(body).encode(), None)

    return change


def unknown_in_header(folder: Path) -> None:
    """What the manifest says is of a type that is known."""
    data = (folder / "model.safetensors").read_bytes()
    changed = data.replace(b'"dtype":"F32"', b'"dtype":"F99"')
    assert changed != data
    change_file(folder, "model.safetensors", changed, 8 + struct.unpack("<Q", data[:8])[0])


UNKNOWN = [
    (unknown_tensor, "'F4_NEW'"),
    (unknown_value({"$": "dtype", "v": "float3"}), "torch.float3"),
    (unknown_value({"$": "array", "dtype": "<f99", "shape": [0], "v": ""}), "'<f99'"),
]


@pytest.mark.parametrize(("change", "name"), UNKNOWN)
def test_an_unknown_element_type_is_not_corruption(tmp_path: Path, change: Callable[[Path], None], name: str) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(0), block=True)
        change(tmp_path / "checkpoint-2")
        state = state_of(1)
        with pytest.raises(CheckpointError, match=f"checkpoint-2.*{name}.*use a newer Stepmark") as caught:
            checkpointer.restore(state)
        assert torch.equal(state["model"].weight, state_of(1)["model"].weight), "changed before it was known"
    assert type(caught.value) is CheckpointError
    assert sorted(path.name for path in tmp_path.glob("*checkpoint*")) == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.parametrize("time", [-1, 1e300, float("nan"), float("inf"), "today"])
def test_a_time_that_no_calendar_has_is_damage(saved: Path, time: Any) -> None:
    body = json.loads((saved / "manifest.json").read_bytes())
    with pytest.raises(CheckpointDamaged, match="is malformed"):
        parse_manifest(signed({**body, "time": time}))


def test_a_large_manifest_has_the_bytes_of_its_shards(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / saved.name))
    monkeypatch.setattr("stepmark.filesystem.json_files._MOST_PARSED", 1000)
    with pytest.raises(CheckpointDamaged, match="more values than such a file can"):
        read_manifest(folder)
    monkeypatch.setattr("stepmark.checkpoint.format.manifest.USUAL", 0)
    with pytest.raises(CheckpointDamaged, match="more values than such a file can"):
        read_manifest(folder)  # of a model of a few bytes
    (folder / "padding").write_bytes(b"1" * (1 << 20))
    read_manifest(folder)
    with open(folder / "padding", "wb") as hollow:
        hollow.truncate(1 << 30)
    with pytest.raises(CheckpointDamaged, match="more values than such a file can"):
        read_manifest(folder)


def test_an_unknown_element_type_that_only_a_header_has_is_damage(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(0), block=True)
        unknown_in_header(tmp_path / "checkpoint-2")
        assert checkpointer.restore(state_of(1)) == 1
    assert (tmp_path / "damaged-checkpoint-2").is_dir()


OUTSIDE = ["../secret", "/etc/passwd", "a/../../secret", ".", "..", "", "a//b", "a\\b/../..", "a\0b", "./x", "a/."]


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_path_leads_outside(saved: Path, name: str) -> None:
    body = json.loads((saved / "manifest.json").read_text())
    body["files"][0]["name"] = name
    with pytest.raises(CheckpointDamaged, match="is not a file name inside the checkpoint"):
        parse_manifest(signed(body))


def link_file(folder: Path, outside: Path) -> None:
    outside.mkdir()
    (folder / "model.safetensors").rename(outside / "model.safetensors")
    (folder / "model.safetensors").symlink_to(outside / "model.safetensors")


def link_folder(folder: Path, outside: Path) -> None:
    (folder / "optimizer").rename(outside)
    (folder / "optimizer").symlink_to(outside)


@pytest.mark.parametrize("link", [link_file, link_folder])
def test_no_link_leads_outside(saved: Path, tmp_path: Path, link: Callable[[Path, Path], None]) -> None:
    folder = tmp_path / "checkpoint-1"
    shutil.copytree(saved, folder)
    link(folder, tmp_path / "outside")
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(CheckpointDamaged, match="is missing"):
        checkpointer.restore(state_of(1), 1)
    assert verify(folder).faults
