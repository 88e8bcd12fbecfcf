"""A model sharded in any way is consolidated bit for bit; an incomplete one is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import stepmark
from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.format.checkpoint_folders import checkpoint_path, point_best
from stepmark.checkpoint.format.integrity import check_integrity
from stepmark.checkpoint.format.manifest import Manifest, TensorEntry, read_manifest
from stepmark.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, CheckpointNotFound, UsageError
from stepmark.filesystem import files
from stepmark.liveness.host_group import HostGroup
from stepmark.model_folder import consolidate as module
from stepmark.model_folder import new_folder
from stepmark.model_folder.consolidate import Consolidated, consolidate
from stepmark.model_folder.model_files import parse_size, split_into_files
from stepmark.model_folder.new_folder import WritingListener
from stepmark.sharding.layout import Box, Layout, annotate
from stepmark.tensor_files import streaming
from stepmark.tensor_files.array_reader import ArrayReader
from stepmark.tensor_files.global_tensor import GlobalTensor, Piece, StoredArray
from tests.support.checkpoint_states import bits, net, range_layout
from tests.support.corruption import flip_bit
from tests.system.distributed.checkpoint_world import run_ranks

RANKS = 4
TOLD: list[str] = []


def whole_tensors() -> dict[str, Tensor]:
    """The unsharded model: every way to shard, and every odd tensor."""
    torch.manual_seed(0)
    return {
        "row": torch.randn(40, 12),
        "column": torch.randn(30, 64).bfloat16(),
        "fused": torch.randn(24, 20),  # three projections of 8 rows each, of which every rank has 2
        "fused_columns": torch.randn(6, 24),
        "middle": torch.randn(3, 8, 5),
        "norm": torch.randn(7),
        "scale": torch.tensor(1.5),
        "count": torch.tensor(123456789),
        "flags": torch.tensor([True, False, True]),
        "eight": torch.randn(16, 8).to(torch.float8_e4m3fn),
        "empty": torch.zeros(0, 3),
        "uneven": torch.randn(10, 3),  # 3, 3, 3, 1
    }


def layouts(rank: int) -> dict[str, Layout]:
    box = Layout.box
    fused = [(Box((third * 8 + rank * 2, 0), (2, 20)), (third * 2, 0)) for third in range(3)]
    columns = [(Box((0, third * 8 + rank * 2), (6, 2)), (0, third * 2)) for third in range(3)]
    return {
        "row": box((40, 12), (rank * 10, 0), (10, 12)),
        "column": box((30, 64), (0, rank * 16), (30, 16)),
        "fused": Layout.boxes((24, 20), fused),
        "fused_columns": Layout.boxes((6, 24), columns),
        "middle": box((3, 8, 5), (0, rank * 2, 0), (3, 2, 5)),
        "eight": range_layout((16, 8), rank * 32, rank * 32 + 32),
        "uneven": box((10, 3), (rank * 3, 0), (min(3, 10 - rank * 3), 3)),
    }


def local(tensor: Tensor, layout: Layout) -> Tensor:
    """What a rank holds of a tensor."""
    first = layout.parts[0].slice
    if not first.is_box:
        return tensor.flatten()[first.start : first.stop].clone()
    boxes = [part.slice.box for part in layout.parts]
    cuts = [
        tensor[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))].clone() for box in boxes
    ]
    ats = [part.at for part in layout.parts]
    dim = 1 if len(ats) > 1 and isinstance(ats[1], tuple) and ats[1][0] == 0 else 0
    return torch.cat(cuts, dim)


def save_sharded(rank: int, folder: str, steps: list[int]) -> None:
    model = nn.Module()
    for name, tensor in whole_tensors().items():
        layout = layouts(rank).get(name)
        model.register_buffer(name, tensor if layout is None else local(tensor, layout))
        if layout is not None:
            annotate(getattr(model, name), layout)
    with Checkpointer(folder, group=HostGroup.of_processes(), max_file_size=3000) as checkpointer:
        for step in steps:
            checkpointer.save(step, {"model": model}, files=write_files, block=True)


def write_files(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "trainer_state.json").write_text("{}")
    (folder / "templates").mkdir()
    (folder / "templates" / "chat.jinja").write_text("hello")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    run_ranks(RANKS, save_sharded, str(folder), [3, 5])
    return folder


@pytest.fixture
def run_folder(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "run", ignore=shutil.ignore_patterns(".stepmark"))
    return tmp_path / "run"


def listen() -> WritingListener:
    TOLD.clear()
    return WritingListener(lambda total: None, lambda count: None, TOLD.append)


def go(source: Path, out: Path, form: str = "safetensors", size: int = 5_000_000_000) -> Consolidated:
    return consolidate(source, out, form, size, listen())


def load_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a model folder, each from the file that the index names."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    for path in sorted(folder.glob("*.bin")):
        found |= torch.load(path, weights_only=True)
    indices = list(folder.glob("*.index.json"))
    if indices:
        body = json.loads(indices[0].read_text())
        assert body["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
        assert set(body["weight_map"]) == set(found)
        for name, file in body["weight_map"].items():
            path = folder / file
            held = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
            assert name in held
    return found


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


def nothing_left(folder: Path) -> bool:
    return not [path for path in folder.iterdir() if "out" in path.name]


@pytest.mark.parametrize("form", ["safetensors", "pytorch"])
@pytest.mark.parametrize("size", [5_000_000_000, 2000])
@pytest.mark.parametrize("window", [streaming.WINDOW, 264])
def test_every_sharding_is_consolidated(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, size: int, window: int
) -> None:
    monkeypatch.setattr(streaming, "WINDOW", window)
    done = go(saved / "checkpoint-5", tmp_path / "out", form, size)
    assert_same(load_folder(tmp_path / "out"), whole_tensors())
    assert done.size == sum(tensor.nbytes for tensor in whole_tensors().values())
    stem = "model{}.safetensors" if form == "safetensors" else "pytorch_model{}.bin"
    count = len(done.shards)
    names = [""] if count == 1 else [f"-{n:05d}-of-{count:05d}" for n in range(1, count + 1)]
    assert list(done.shards) == [stem.format(name) for name in names]
    assert (count > 1) == (size == 2000)
    files = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    index = {f"{stem.format('')}.index.json"} if count > 1 else set()
    assert files == {*done.shards, *index, "config.json", "tokenizer.json", "templates/chat.jinja"}
    assert not TOLD


def test_large_tensors_go_in_blocks_and_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger than a read, a window and several checksum blocks, beginning anywhere in a block."""
    monkeypatch.setattr(streaming, "WINDOW", 3 << 20)
    torch.manual_seed(1)
    wanted = {"a": torch.randn(1001), "b": torch.randn(1500, 1601), "c": torch.randn(2100, 1003)}
    run_ranks(2, save_large, str(tmp_path / "run"), wanted)
    go(tmp_path / "run", tmp_path / "out")
    assert_same(load_folder(tmp_path / "out"), wanted)


def save_large(rank: int, folder: str, tensors: dict[str, Tensor]) -> None:
    model = nn.Module()
    model.register_buffer("a", tensors["a"])
    model.register_buffer("b", tensors["b"][:, rank * 800 : rank * 800 + 800 + rank].clone())
    annotate(model.b, Layout.box((1500, 1601), (0, rank * 800), (1500, 800 + rank)))
    model.register_buffer("c", tensors["c"][rank * 1050 : rank * 1050 + 1050].clone())
    annotate(model.c, Layout.box((2100, 1003), (rank * 1050, 0), (1050, 1003)))
    with Checkpointer(folder, group=HostGroup.of_processes()) as checkpointer:
        checkpointer.save(1, {"model": model}, block=True)


def test_a_pytorch_file_has_the_sums_that_torch_writes(saved: Path, tmp_path: Path) -> None:
    """So that stepmark.load can verify it, and a flipped bit does not pass."""
    go(saved, tmp_path / "out", "pytorch")
    path = tmp_path / "out" / "pytorch_model.bin"
    assert_same(stepmark.load(path), whole_tensors())
    data = bytearray(path.read_bytes())
    data[data.index(bits(whole_tensors()["row"])) + 100] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointDamaged, match="data/"):
        stepmark.load(path)


@pytest.mark.parametrize("form", ["safetensors", "pytorch"])
def test_a_full_disk(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    def fail(descriptor: int, data: memoryview, offset: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "write_at", fail)
    with pytest.raises(CheckpointError, match=r"out cannot be written: No space left"):
        go(saved, tmp_path / "out", form)
    assert nothing_left(tmp_path)


@pytest.mark.parametrize("model_only", [False, True])
def test_a_model_that_is_not_sharded(tmp_path: Path, model_only: bool) -> None:
    """Tied weights once, other types, an empty buffer, a strided one; a missing config is not an error."""
    model = net(3)
    with Checkpointer(tmp_path / "run") as checkpointer:
        state: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
        checkpointer.save(2, {"model": model} if model_only else state, model_only=model_only, block=True)
    go(tmp_path / "run", tmp_path / "out")
    held = load_file(tmp_path / "run" / "checkpoint-2" / "model.safetensors")
    assert_same(load_folder(tmp_path / "out"), held)
    assert_same(held, {name: tensor for name, tensor in model.state_dict().items() if name in held})
    assert any("config.json" in line for line in TOLD)


def data_file(checkpoint: Path, tensor: str) -> Path:
    manifest = read_manifest(checkpoint)
    return checkpoint / manifest.files[manifest.tensors["model"][tensor].slices[0][0]].name


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "data": (lambda checkpoint: flip_bit(data_file(checkpoint, "column")), "does not match its checksum"),
    "missing": (lambda checkpoint: data_file(checkpoint, "column").unlink(), "is missing; tensor '.*' is in that file"),
    "config": (lambda checkpoint: flip_bit(checkpoint / "config.json"), "config.json does not match its checksum"),
    "manifest": (lambda checkpoint: (checkpoint / "manifest.json").unlink(), "manifest.json is missing"),
}


@pytest.mark.parametrize("form", ["safetensors", "pytorch"])
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_corrupted_source_leaves_nothing(run_folder: Path, tmp_path: Path, kind: str, form: str) -> None:
    damage, words = DAMAGES[kind]
    damage(run_folder / "checkpoint-5")
    with pytest.raises(CheckpointDamaged, match=words):
        go(run_folder / "checkpoint-5", tmp_path / "out", form)
    assert nothing_left(tmp_path)


@pytest.mark.parametrize("kind", DAMAGES)
def test_of_a_run_the_newest_complete_checkpoint(run_folder: Path, tmp_path: Path, kind: str) -> None:
    assert go(run_folder, tmp_path / "first").checkpoint.name == "checkpoint-5"
    damage, _ = DAMAGES[kind]
    damage(run_folder / "checkpoint-5")
    assert go(run_folder, tmp_path / "out").checkpoint.name == "checkpoint-3"
    assert len(TOLD) == 1
    assert "checkpoint-5 is corrupted" in TOLD[0]
    assert_same(load_folder(tmp_path / "out"), whole_tensors())
    damage(run_folder / "checkpoint-3")
    with pytest.raises(CheckpointDamaged, match="none of the 2 checkpoints"):
        go(run_folder, tmp_path / "none")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "out", "run"]


def test_a_file_that_changes_in_the_meantime(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is copied is checked while it is copied, not only before."""
    monkeypatch.setattr(module, "check_integrity", lambda folder, manifest: flip_bit(folder / "config.json"))
    with pytest.raises(CheckpointDamaged, match=r"config\.json does not match its checksum"):
        go(run_folder / "checkpoint-5", tmp_path / "out")
    assert nothing_left(tmp_path)


def test_a_link_that_is_moved_in_the_meantime(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`best` of a live run: what it led to at first is consolidated, and nothing of another."""
    point_best(run_folder, 3)

    def check(checkpoint: Path, manifest: Manifest) -> None:
        check_integrity(checkpoint, manifest)
        point_best(run_folder, 5)
        flip_bit(data_file(run_folder / "checkpoint-5", "column"))

    monkeypatch.setattr(module, "check_integrity", check)
    assert go(run_folder / "best", tmp_path / "out").checkpoint.name == "checkpoint-3"
    assert_same(load_folder(tmp_path / "out"), whole_tensors())


def test_a_step_that_is_saved_again_in_the_meantime_is_consolidated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net(3)
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": net(2)}, block=True)

        def save_first(checkpoint: Path, manifest: Manifest) -> None:
            monkeypatch.setattr(module, "check_integrity", check_integrity)
            checkpointer.save(1, {"model": model}, block=True)
            check_integrity(checkpoint, manifest)

        monkeypatch.setattr(module, "check_integrity", save_first)
        go(tmp_path / "run", tmp_path / "out")
    found = load_folder(tmp_path / "out")
    assert_same(found, {name: tensor for name, tensor in model.state_dict().items() if name in found})


@pytest.mark.parametrize("name", ["row", "column"])
def test_overlapping_shards_are_refused(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As many elements as the tensor has, but some twice and some not at all."""
    real = module.read_manifest

    def overlapping(folder: Path) -> Any:
        manifest = real(folder)
        entry = manifest.tensors["model"][name]
        slices = (entry.slices[0], *entry.slices[:-1])
        manifest.tensors["model"][name] = TensorEntry(entry.dtype, entry.shape, slices)  # type: ignore[index]
        return manifest

    monkeypatch.setattr(module, "read_manifest", overlapping)
    with pytest.raises(CheckpointDamaged, match=f"tensor '{name}' .* or overlap"):
        go(run_folder / "checkpoint-5", tmp_path / "out")
    assert nothing_left(tmp_path)


def test_out_in_use_is_refused_and_kept(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("dear to me")
    with pytest.raises(UsageError, match="is not an empty folder"):
        go(saved, out)
    with pytest.raises(UsageError, match="is not an empty folder"):
        go(saved, out / "mine")
    assert (out / "mine").read_text() == "dear to me"
    with pytest.raises(UsageError, match="is inside"):
        go(saved, saved / "checkpoint-5" / "plain")
    (out / "mine").unlink()
    go(saved, out)
    assert (out / "model.safetensors").exists()


def test_a_mount_point_is_refused_before_anything_is_written(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a container's volume is one: no folder can be renamed to it."""
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == out)
    with pytest.raises(UsageError, match=f"a file system is mounted; name a folder in it, such as {out}/model"):
        go(saved, out)
    assert list(tmp_path.iterdir()) == [out]
    go(saved, out / "model")
    assert (out / "model" / "model.safetensors").exists()


def test_out_that_fills_in_the_meantime_is_kept(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"

    def fill(path: Path) -> None:
        out.mkdir()
        (out / "mine").write_text("dear to me")

    monkeypatch.setattr(new_folder, "sync_tree", fill)
    with pytest.raises(CheckpointError, match="cannot be written"):
        go(saved, out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in out.iterdir()] == ["mine"]


def test_nothing_to_consolidate(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="neither a checkpoint"):
        go(tmp_path, tmp_path / "out")
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"loader": {"x": torch.ones(2)}}, block=True)
    with pytest.raises(CheckpointMismatch, match="no section 'model'.*it holds loader"):
        go(checkpoint_path(tmp_path / "run", 1), tmp_path / "out")
    assert nothing_left(tmp_path)


def test_a_full_disk_is_known_beforehand(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"free and .* are needed"):
        go(saved, tmp_path / "out")
    assert nothing_left(tmp_path)


def test_sizes() -> None:
    assert [parse_size(text) for text in ("5GB", "1.5 MB", "2gib", "7")] == [5 * 10**9, 1_500_000, 2 << 30, 7]
    for text in ("", "GB", "0", "-1GB", "5 bananas", "0.1"):
        with pytest.raises(UsageError, match="--max-shard-size"):
            parse_size(text)


def test_shards_are_full_and_a_large_tensor_is_alone() -> None:
    tensors = {str(n): GlobalTensor(str(n), "F32", (size,), ()) for n, size in enumerate([25, 25, 200, 10, 15, 25])}
    shards = split_into_files(tensors, "safetensors", 200)
    assert [list(part) for part in shards.values()] == [["0", "1"], ["2"], ["3", "4", "5"]]


def test_it_needs_no_torch_for_safetensors(saved: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from stepmark.cli.main import run; "
        "code = run(['consolidate', *sys.argv[1:]]); "
        "print(code, [name for name in ('torch', 'torch_xla', 'transformers') if name in sys.modules])"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, str(saved), str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    assert told.stdout.splitlines()[-1] == "0 []"


def test_memory_is_bounded_by_a_window(tmp_path: Path) -> None:
    """A job for each window, none of which is larger than WINDOW."""
    shape, half = (4096, 1 << 20), (4096, 1 << 19)
    array = StoredArray.contiguous(tmp_path / "file", 0, "BF16", half)
    tensor = GlobalTensor("big", "BF16", shape, (Piece(array, (0, 0)), Piece(array, (0, 1 << 19))))
    output: Any = None
    found = list(streaming.write_jobs([streaming.WrittenTensor(tensor, 0)], ArrayReader(), output))
    assert len(found) == tensor.nbytes // streaming.WINDOW
