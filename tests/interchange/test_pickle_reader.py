"""Pickles of other tools: their values are read, and nothing of them is run."""

from __future__ import annotations

import os
import pickle
import resource
import struct
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from stepmark.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from stepmark.tensor_files.global_tensor import StoredArray
from stepmark.tensor_files.pickle_reader import PickledObject, read_pickle
from stepmark.tensor_files.torch_file import read_torch_file


class Runs:
    """What a malicious pickle has in it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def read(data: bytes) -> Any:
    return read_pickle(data)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_plain_values(protocol: int) -> None:
    value = {"a": [1, -2, 1 << 70, 2.5, None, True], "b": (b"x", "text"), 3: {"nested": {1, 2}}}
    value["ordered"] = OrderedDict(x=1)
    value["size"] = torch.Size([2, 3])
    assert read(pickle.dumps(value, protocol)) == {**value, "ordered": {"x": 1}, "size": (2, 3)}


def test_no_code_runs(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="mkdir"):
        read(pickle.dumps({"model": Runs(tmp_path / "made")}))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["builtins eval", "os system", "torch.hub load", "builtins getattr"])
def test_functions_that_no_format_has_are_named(name: str) -> None:
    with pytest.raises(CheckpointError, match=name.replace(" ", ".")):
        read(f"c{name.replace(' ', chr(10))}\n(S'x'\ntR.".encode())


def test_known_classes_become_names_and_attributes() -> None:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    found = read(pickle.dumps(MetadataIndex("w", torch.Size([1, 0]), 2)))
    assert isinstance(found, PickledObject)
    assert (found.get("fqn"), found.get("offset")) == ("w", (1, 0))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"}",
        b"K\x01K\x02s.",
        b"]" * 100 + b"." + b"\x00",
        b"\x8d" + struct.pack("<Q", 1 << 60) + b"x.",  # a text longer than the file
        b"(" * 1000 + b"t" * 1000 + b"u.",
        b"j\xff\xff\xff\x7f.",  # a value that was never kept
    ],
)
def test_malformed_ones_are_refused(data: bytes) -> None:
    if data.startswith(b"]" * 100):
        assert read(data) == []
        return
    with pytest.raises(CheckpointError):
        read(data)


def integer(value: int) -> bytes:
    return b"\x8a\x0b" + value.to_bytes(11, "little", signed=True)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        pytest.param(b"}K\x01" + b"\x85" * 3_000_000 + b"K\x02s.", CheckpointError, id="nested key"),
        pytest.param(b"}K\x01" + b"2\x86" * 60 + b"K\x02s.", CheckpointError, id="key of 2^60 parts"),
        pytest.param(b"\x8f(K\x01" + b"2\x86" * 60 + b"\x90.", CheckpointError, id="item of 2^60 parts"),
        pytest.param(
            b"}(" + b"".join(integer(((1 << 61) - 1) * k) + b"N" for k in range(1, 60_000)) + b"u.",
            CheckpointError,
            id="keys that collide",
        ),
        pytest.param(b"K\x01r\xff\xff\xff\x7fr\xff\xff\xff\x6f.", None, id="memory for values kept"),
        pytest.param(b"\x96" + struct.pack("<Q", 1 << 50) + b"x.", CheckpointError, id="memory for bytes"),
        pytest.param(b"\x8b" + struct.pack("<i", 1 << 30) + b"x.", CheckpointError, id="integer of a gigabyte"),
    ],
)
def test_no_pickle_takes_more_than_its_size(data: bytes, kind: type[Exception] | None) -> None:
    """Each of them ends Python's own unpickler in C, or keeps it busy, or takes gigabytes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.process_time()
    if kind is None:
        assert read(data) == 1
    else:
        with pytest.raises(kind):
            read(data)
    assert time.process_time() - begin < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


def test_copies_are_bounded() -> None:
    """A list, again and again as the argument of a constructor, would take memory without end."""
    many = b"(" + b"K\x01" * 1000 + b"l\x94" + b"0" + b"cbuiltins\nlist\nh\x00\x85R0" * 4000 + b"N."
    with pytest.raises(CheckpointDamaged, match="again and again"):
        read(many)


def test_sharing_does_not_make_a_file_endless(tmp_path: Path) -> None:
    """Lists that contain the one before twice have 2^60 items, if each is visited every time."""
    value: Any = [0]
    for _ in range(60):
        value = [value, value]
    torch.save({"model": value}, tmp_path / "x.pt")
    with pytest.raises(CheckpointDamaged, match="again and again"):
        read_torch_file(tmp_path / "x.pt", [])


def test_tensors_are_found_where_torch_put_them(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32).view(4, 6)
    value = {"t": base.t(), "row": base[2], "number": torch.tensor(5, dtype=torch.int64), "low": base.bfloat16()}
    torch.save(value, tmp_path / "x.pt")
    found = read_torch_file(tmp_path / "x.pt", [])
    data = (tmp_path / "x.pt").read_bytes()
    for name, tensor in value.items():
        array = found[name]
        assert isinstance(array, StoredArray)
        raw = torch.frombuffer(bytearray(data[array.offset : array.offset + array.span()]), dtype=tensor.dtype)
        assert torch.equal(raw.as_strided(array.shape, array.strides), tensor)


def test_files_from_before_archives_name_the_way_out(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointMismatch, match=r"x\.pt.*before version 1\.6.*torch\.save\(torch\.load"):
        read_torch_file(tmp_path / "x.pt", [])


def test_tensor_larger_than_its_storage(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1).expand(1 << 40)}, tmp_path / "x.pt")
    with pytest.raises(CheckpointDamaged, match="repeats elements"):
        read_torch_file(tmp_path / "x.pt", [])
