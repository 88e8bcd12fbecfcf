"""docs/checkpoint-format.md and its schema are true of real checkpoints, which a reader written from it reads."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor, nn

from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.format.manifest import read_manifest
from stepmark.errors import CheckpointError
from stepmark.sharding.layout import Box, Layout, Part, Shard, TensorSlice, annotate
from tests.support import independent_reader
from tests.support.independent_reader import read_checkpoint
from tests.support.ranks import ROOT
from tests.system.distributed.checkpoint_world import run_ranks

DOCUMENT = (ROOT / "docs" / "checkpoint-format.md").read_text()
SCHEMA = json.loads((ROOT / "docs" / "manifest.schema.json").read_text())
WIDTH = 700  # so that a tensor has several checksum blocks
VALUES: dict[str, Any] = {
    "none": None,
    "float": 0.1,
    "odd floats": [math.inf, -math.inf],
    "int": 1 << 2000,
    "tuple": (1, [2.5], frozenset({3})),
    "keys": {1: "one", (2, 3): "two", "$": 4},
    "ordered": OrderedDict([("b", 1), ("a", 2)]),
    "bytes": b"\x00\xff",
    "complex": 1.5 - 2j,
    "array": np.arange(6, dtype=">i2").reshape(2, 3),
    "scalar": np.float32(1.25),
    "size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
}


class Sharded:
    """An optimizer whose states are ranges of the boxes that tensor parallel ranks hold, as ZeRO-1 makes them."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def named_state(self) -> dict[str, Any]:
        half, column = 1000, self.rank % 2  # the data parallel boundary is at element 1000 of the box, inside a row
        box = Box((0, column * WIDTH), (WIDTH, WIDTH))
        start, stop = (0, half) if self.rank < 2 else (half, box.numel)
        values = part_of(whole()["cut"] * 2, box).reshape(-1)[start:stop].clone()
        layout = Layout((WIDTH, 2 * WIDTH), (Part(TensorSlice(box, start, stop), 0),))
        return {"cut": {"exp_avg": Shard(values, layout), "step": torch.tensor(7.0)}, "plain": {"count": 3}}

    def named_groups(self) -> list[dict[str, Any]]:
        return [{"lr": 0.5, "betas": (0.9, 0.999), "params": ["cut", "plain"]}]


def whole() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "cut": torch.randn(WIDTH, 2 * WIDTH, generator=generator),
        "plain": torch.randn(5, generator=generator).bfloat16(),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 2),
    }


def part_of(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))].contiguous()


def save(rank: int, folder: Path) -> None:
    """2 tensor parallel times 2 data parallel ranks."""
    model = nn.Module()
    column = Box((0, rank % 2 * WIDTH), (WIDTH, WIDTH))
    for name, tensor in whole().items():
        model.register_buffer(name, part_of(tensor, column) if name == "cut" else tensor)
    model.register_buffer("tied", model.plain)
    annotate(model.cut, Layout.box((WIDTH, 2 * WIDTH), column.offsets, column.lengths))  # type: ignore[arg-type]
    state = {"model": model, "optimizer": Sharded(rank), "nest": {**VALUES, "t": [torch.arange(4), torch.arange(3)]}}
    with Checkpointer(folder, mesh={"dp": 2, "tp": 2}, max_file_size=3_000_000) as checkpointer:
        extra = {"metadata": {"note": (1, 2)}, "metrics": {"eval_loss": 0.5}}
        checkpointer.save(12, state, files=lambda to: (to / "config.json").write_text("{}"), block=True, **extra)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("format")
    run_ranks(4, save, folder)
    return folder / "checkpoint-12"


def same(found: Any, tensor: Tensor) -> bool:
    raw = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.zeros(0, dtype=torch.uint8)
    return tuple(found.shape) == tuple(tensor.shape) and found.tobytes() == raw.numpy().tobytes()


def test_a_reader_written_from_the_document_reads_everything(checkpoint: Path) -> None:
    manifest, sections, groups = read_checkpoint(checkpoint)
    expected = whole()
    assert all(same(groups["model"][name], tensor) for name, tensor in expected.items())
    assert same(groups["optimizer/optimizer"]["cut/exp_avg"], expected["cut"] * 2)
    assert float(groups["optimizer/optimizer"]["cut/step"]) == 7.0
    assert groups.keys() == {"model", "optimizer/optimizer", "state/nest"}
    assert groups["model"].keys() == expected.keys()
    assert [sections["model"][key] for key in ("kind", "tied", "extra")] == ["module", {"tied": "plain"}, {}]
    optimizer = sections["optimizer"]
    assert optimizer["groups"] == {"0": {"lr": 0.5, "betas": (0.9, 0.999)}}
    assert optimizer["members"] == {"cut": 0, "plain": 0}
    assert optimizer["state"] == {"plain": {"count": 3}}
    assert (manifest["step"], manifest["world_size"], manifest["mesh"]) == (12, 4, {"dp": 2, "tp": 2})
    assert manifest["metrics"] == {"eval_loss": 0.5}
    assert independent_reader.decode(manifest["metadata"], {}) == {"note": (1, 2)}


def test_values_are_what_the_document_says(checkpoint: Path) -> None:
    _, sections, _ = read_checkpoint(checkpoint)
    found = sections["nest"]["value"]
    for name, value in VALUES.items():
        if name == "array":
            assert found[name].dtype == value.dtype
            assert (found[name] == value).all()
        else:
            assert found[name] == ("bfloat16" if name == "dtype" else value), name
    assert [list(tensor) for tensor in found["t"]] == [[0, 1, 2, 3], [0, 1, 2]]


def test_the_files_are_those_of_the_document(checkpoint: Path) -> None:
    manifest, _, _ = read_checkpoint(checkpoint)
    there = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    assert there == {"manifest.json", *(file["name"] for file in manifest["files"])}
    tensor_files = [file for file in manifest["files"] if "header" in file]
    assert {file["name"].partition("-0")[0].removesuffix(".safetensors") for file in tensor_files} == {
        *manifest["tensors"]
    }
    for file in tensor_files:
        ends = [end for _, end in file["writers"]]
        assert ends == sorted(ends)
        assert ends[-1] == file["size"] - file["header"]
        assert {rank for rank, _ in file["writers"]} <= set(range(4))
    for tensors in manifest["tensors"].values():
        for _, _, place in tensors.values():
            numbers = [place] if isinstance(place, int) else [tensor_slice[0] for tensor_slice in place]
            assert len(numbers) == len(set(numbers))
    slices = manifest["tensors"]["optimizer/optimizer"]["cut/exp_avg"][2]
    assert sorted(len(tensor_slice) for tensor_slice in slices) == [5, 5, 5, 5]
    assert "model.safetensors.index.json" not in there  # a tensor of the model is sharded


@pytest.mark.parametrize("victim", ["manifest.json", "state.json", "config.json", "model", "optimizer/optimizer"])
def test_that_reader_finds_a_flipped_bit(checkpoint: Path, tmp_path: Path, victim: str) -> None:
    shutil.copytree(checkpoint, tmp_path / "copy")
    path = sorted((tmp_path / "copy").glob(f"{victim}*"))[0]
    data = bytearray(path.read_bytes())
    data[-10 if path.suffix == ".safetensors" else len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(AssertionError, match=r"differs from its digest|a checksum block is corrupted"):
        read_checkpoint(tmp_path / "copy")


def test_a_newer_version_is_neither_guessed_nor_called_corrupted(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "copy")
    path = tmp_path / "copy" / "manifest.json"
    text = path.read_text().replace('"version": 1,', '"version": 2,')
    blank = re.sub(r'"digest": "\w{32}"\n\}\n\Z', f'"digest": "{"0" * 32}"\n}}\n', text).encode()
    path.write_bytes(blank.replace(b"0" * 32 + b'"\n}', xxhash.xxh3_128_hexdigest(blank).encode() + b'"\n}'))
    with pytest.raises(CheckpointError, match="version 2.*use a newer Stepmark") as caught:
        read_manifest(tmp_path / "copy")
    assert type(caught.value) is CheckpointError
    with pytest.raises(NotImplementedError, match="newer reader"):
        read_checkpoint(tmp_path / "copy")


KEYWORDS = {"$schema", "$id", "$defs", "$ref", "title", "description", "type", "const", "enum", "pattern", "minimum"}
KEYWORDS |= {"properties", "required", "additionalProperties", "items", "prefixItems", "minItems", "maxItems", "oneOf"}
KEYWORDS |= {"maximum"}
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}


def problems(value: Any, schema: dict[str, Any], where: str = "manifest") -> list[str]:
    """What of a value the schema does not allow; knows the keywords that ours uses."""
    assert schema.keys() <= KEYWORDS, schema.keys() - KEYWORDS
    if "$ref" in schema:
        return problems(value, SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")], where)
    if "oneOf" in schema:
        fitting = [one for one in schema["oneOf"] if not problems(value, one, where)]
        return [] if len(fitting) == 1 else [f"{where}: fits {len(fitting)} of the alternatives"]
    kind = schema.get("type")
    if kind and (not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return [f"{where}: is no {kind}"]
    found = [f"{where}: is not {schema['const']!r}"] if "const" in schema and value != schema["const"] else []
    found += [f"{where}: is not in {schema['enum']}"] if "enum" in schema and value not in schema["enum"] else []
    found += [f"{where}: is too small"] if "minimum" in schema and value < schema["minimum"] else []
    found += [f"{where}: is too large"] if "maximum" in schema and value > schema["maximum"] else []
    if "pattern" in schema and not re.search(schema["pattern"], value):
        found.append(f"{where}: does not match {schema['pattern']}")
    if isinstance(value, dict):
        found += [f"{where}: lacks {key}" for key in schema.get("required", ()) if key not in value]
        for key, item in value.items():
            rule = schema.get("properties", {}).get(key, schema.get("additionalProperties", {}))
            found += problems(item, rule, f"{where}.{key}")
    if isinstance(value, list):
        rules = schema.get("prefixItems", [])
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            found.append(f"{where}: has {len(value)} items")
        for index, item in enumerate(value):
            rule = rules[index] if index < len(rules) else schema.get("items", {})
            found += problems(item, rule, f"{where}[{index}]")
    return found


def test_the_schema_allows_a_real_manifest_and_the_documents(checkpoint: Path) -> None:
    assert problems(json.loads((checkpoint / "manifest.json").read_text()), SCHEMA) == []
    (example,) = re.findall(r"```json\n(\{\n\"format\".*?\n\}\n)```", DOCUMENT, re.DOTALL)
    assert problems(json.loads(example), SCHEMA) == []
    digest = json.loads(example)["digest"]
    assert xxhash.xxh3_128_hexdigest(example.replace(digest, "0" * 32).encode()) == digest


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), "other"),
        (("version",), 0),
        (("step",), -1),
        (("step",), True),
        (("time",), 1e300),
        (("files", 0, "name"), "../elsewhere"),
        (("files", 0, "digest"), "short"),
        (("files", 0, "writers"), [[0]]),
        (("tensors", "model", "plain"), ["F32", [5]]),
        (("tensors", "model", "plain"), ["F31", [5], 0]),
        (("tensors", "model", "cut", 2, 0), [0, [0, 0]]),
        (("sections", "model"), "modul"),
        (("digest",), None),
    ],
)
def test_the_schema_refuses_others(checkpoint: Path, path: tuple[Any, ...], value: Any) -> None:
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    inner = manifest
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    assert problems(manifest, SCHEMA)
