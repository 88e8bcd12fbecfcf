"""A reader of checkpoints that knows nothing but docs/checkpoint-format.md and docs/checkpoint-values.md: no torch, and
nothing of stepmark's."""

from __future__ import annotations

import base64
import itertools
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

NUMPY = {"F64": "f8", "F32": "f4", "F16": "f2", "BF16": "u2", "I64": "i8", "I32": "i4", "U8": "u1", "BOOL": "?"}


def read_manifest(folder: Path) -> dict[str, Any]:
    data = (folder / "manifest.json").read_bytes()
    ending = b"\n}\n"
    digest = data[-len(ending) - 33 : -len(ending) - 1]
    assert data.endswith(b'"digest": "' + digest + b'"' + ending)
    blank = data[: -len(ending) - 33] + b"0" * 32 + b'"' + ending
    assert xxhash.xxh3_128_hexdigest(blank).encode() == digest, "manifest.json differs from its digest"
    manifest = json.loads(data)
    assert manifest["format"] == "stepmark-checkpoint"
    if manifest["version"] > 1:
        raise NotImplementedError(f"version {manifest['version']} needs a newer reader")
    return dict(manifest)


def read_file(folder: Path, manifest: dict[str, Any], file: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors in one file, by name, as they are stored; none of a file without tensors. Every byte is checked."""
    assert all(part not in ("", ".", "..") for part in file["name"].split("/"))
    data = (folder / file["name"]).read_bytes()
    assert len(data) == file["size"]
    first = file.get("header", len(data))
    assert xxhash.xxh3_128_hexdigest(data[:first]) == file["digest"], f"{file['name']} differs from its digest"
    if "header" not in file:
        return {}
    assert struct.unpack("<Q", data[:8])[0] + 8 == first
    assert first % 4096 == 0
    header = json.loads(data[8:first])
    metadata = header.pop("__metadata__")
    own = json.loads(metadata["stepmark"])
    assert (own["version"], own["save"], own["step"]) == (1, manifest["save"], f"{manifest['step']:020}")
    tensors, position, sizes = {}, 0, []
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        assert begin == position, "there is a gap"
        check_blocks(data[first:], begin, end, own["cell"], own["digests"][name])
        array = np.frombuffer(data[first + begin : first + end], dtype="<" + NUMPY[entry["dtype"]])
        tensors[name] = array.reshape(entry["shape"])
        sizes += [array.itemsize]
        position = end
    assert position == len(data) - first
    assert sizes == sorted(sizes, reverse=True)
    check_slices(own["pieces"], json.loads(metadata["DCP_SHARDING_INFO"]), tensors)
    return tensors


def check_blocks(data: bytes, begin: int, end: int, size: int, checksums: str) -> None:
    cuts = sorted({begin, end, *(at for at in range(0, end, size) if begin < at)})
    found = "".join(xxhash.xxh3_64_hexdigest(data[low:high]) for low, high in itertools.pairwise(cuts))
    assert checksums == found, "a checksum block is corrupted"


def check_slices(slices: dict[str, Any], sharding: dict[str, Any], tensors: dict[str, Any]) -> None:
    assert sharding.keys() == tensors.keys()
    for name, entry in slices.items():
        lengths = [entry["range"][1] - entry["range"][0]] if "range" in entry else entry["lengths"]
        assert list(tensors[name].shape) == lengths
        assert sharding[name]["saved_offsets"] == entry["offsets"]


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, dict[str, Any]]]:
    """Manifest, state.json's sections with their values, and group → name → global tensor."""
    manifest = read_manifest(folder)
    stored = [read_file(folder, manifest, file) for file in manifest["files"]]
    groups: dict[str, dict[str, Any]] = {}
    for group, tensors in manifest["tensors"].items():
        groups[group] = {name: assemble(name, entry, stored) for name, entry in tensors.items()}
    state = json.loads((folder / "state.json").read_text())
    assert state["version"] == 1
    sections = {}
    for section, values in state["sections"].items():
        kind = manifest["sections"][section]
        group = {"module": section if section == "model" else f"state/{section}", "optimizer": f"optimizer/{section}"}
        group["named"] = group["optimizer"]
        mine = groups.get(group.get(kind, f"state/{section}"), {})
        sections[section] = decode(values, mine)
    return manifest, sections, groups


def assemble(name: str, entry: list[Any], stored: list[dict[str, Any]]) -> np.ndarray[Any, Any]:
    """A global tensor from its slices, which do not overlap and leave nothing out."""
    dtype, shape, place = entry
    if isinstance(place, int):
        assert list(stored[place][name].shape) == shape
        return np.asarray(stored[place][name])
    whole, seen = np.zeros(shape, dtype="<" + NUMPY[dtype]), np.zeros(shape, dtype=int)
    for number, offsets, lengths, *part in place:
        box = tuple(slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))
        start, stop = part or (0, int(np.prod(lengths)))
        for target, values in ((whole, stored[number][name].reshape(-1)), (seen, 1)):
            flat = target[box].reshape(-1)  # a copy, in row-major order
            flat[start:stop] += values
            target[box] = flat.reshape(lengths)
    assert (seen == 1).all(), "slices overlap, or leave a part out"
    return whole


def decode(value: Any, tensors: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {key: decode(item, tensors) for key, item in value.items()}
    kind, inner = value["$"], value["v"]
    if kind in ("dict", "ordered", "counter"):
        return {decode(key, tensors): decode(item, tensors) for key, item in inner}
    if kind in ("tuple", "set", "frozenset"):
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](decode(item, tensors) for item in inner)
    if kind in ("array", "scalar"):
        array = np.frombuffer(base64.b64decode(inner), dtype=value["dtype"]).reshape(value["shape"])
        return array if kind == "array" else array[()]
    plain = {
        "tensor": lambda: tensors[inner],
        "float": lambda: struct.unpack(">d", bytes.fromhex(inner))[0],
        "int": lambda: int(inner, 16),
        "complex": lambda: complex(*struct.unpack(">dd", bytes.fromhex(inner))),
        "bytes": lambda: base64.b64decode(inner),
        "size": lambda: tuple(inner),
        "dtype": lambda: inner,
        "device": lambda: inner,
    }
    return plain[kind]()
