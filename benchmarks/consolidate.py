"""Seconds and peak memory of `stepmark consolidate` beside `cp` of the same bytes.

    .venv/bin/python benchmarks/consolidate.py --gigabytes 8 --folder /a/disk

A synthetic bf16 checkpoint of 8 tensor parallel ranks with the tensors of a Llama: projections cut by rows and by
columns, embedding and head by rows, norms replicated. It is laid out by the planner that real saves use. Command and cp
run in turn, round after round, from a source that is not in the page cache; each is timed until its bytes are on the
disk (cp is followed by `sync` of its files, which the command does itself). cp alone, without that, is printed as well.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from page_cache import drop_cache

from stepmark.checkpoint.format.checksums import block_checksum, bytes_checksum
from stepmark.checkpoint.format.manifest import MANIFEST, VALUES, FileEntry, Manifest, TensorEntry
from stepmark.checkpoint.format.tensor_file import Header
from stepmark.checkpoint.save.plan import Holding, PlannedFile, SliceRecord, plan_save
from stepmark.sharding.layout import Shape, TensorSlice

RANKS, HIDDEN, INNER, VOCABULARY = 8, 4096, 11008, 32000
SAVE = "0" * 32
Cuts = dict[str, tuple[Shape, int | None]]  # name -> shape, dim that is cut


def cuts(layers: int) -> Cuts:
    """The model's tensors."""
    square, wide, narrow = (HIDDEN, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)
    found: Cuts = {"model.embed_tokens.weight": ((VOCABULARY, HIDDEN), 0), "lm_head.weight": ((VOCABULARY, HIDDEN), 0)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        found |= {f"{prefix}.self_attn.{name}_proj.weight": (square, 0) for name in "qkv"}
        found[f"{prefix}.self_attn.o_proj.weight"] = (square, 1)
        found |= {f"{prefix}.mlp.{name}_proj.weight": (wide, 0) for name in ("gate", "up")}
        found[f"{prefix}.mlp.down_proj.weight"] = (narrow, 1)
        found[f"{prefix}.input_layernorm.weight"] = ((HIDDEN,), None)
    return found


def piece_of(shape: Shape, dim: int | None, rank: int) -> TensorSlice:
    if dim is None:
        return TensorSlice.full(shape)
    lengths = tuple(size // RANKS if d == dim else size for d, size in enumerate(shape))
    return TensorSlice.of_box(tuple(rank * lengths[d] if d == dim else 0 for d in range(len(shape))), lengths)


def make_checkpoint(folder: Path, gigabytes: float) -> int:
    """Writes the checkpoint; the bytes of its files."""
    per_layer = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER)
    tensors = cuts(max(1, round((gigabytes * 1e9 - 4 * VOCABULARY * HIDDEN) / per_layer)))
    holdings = [
        Holding(
            tuple(
                SliceRecord("model", name, "BF16", shape, piece_of(shape, dim, rank))
                for name, (shape, dim) in tensors.items()
            ),
            (rank,),
        )
        for rank in range(RANKS)
    ]
    plan = plan_save(holdings, [0] * RANKS, SAVE)
    noise = np.random.default_rng(0).integers(0, 256, 1 << 26, dtype=np.uint8)
    entries, slices = [], {name: [] for name in tensors}
    for number, file in enumerate(plan.files):
        entries.append(write_file(folder, file, noise))
        for stored in file.tensors:
            slices[stored.name].append((number, stored.slice))
    values = b'{"version": 1, "sections": {"model": {"kind": "module", "value": null}}}'
    (folder / VALUES).write_bytes(values)
    entries.append(FileEntry(VALUES, len(values), bytes_checksum(values)))
    table = {name: TensorEntry("BF16", shape, tuple(slices[name])) for name, (shape, _) in tensors.items()}
    manifest = Manifest(
        1, SAVE, 0.0, {}, RANKS, {"tp": RANKS}, True, {"model": "module"}, tuple(entries), {"model": table}
    )
    (folder / MANIFEST).write_bytes(manifest.to_bytes())
    os.sync()
    return sum(entry.size for entry in entries)


def write_file(folder: Path, file: PlannedFile, noise: np.ndarray) -> FileEntry:
    digests: dict[str, list[str]] = {}
    with open(folder / file.name, "wb") as out:
        out.seek(file.header_size)
        for tensor in file.tensors:
            digests[tensor.name] = []
            for begin, end in tensor.checksum_blocks():
                start = begin * 7919 % (len(noise) - (end - begin))
                block = memoryview(noise[start : start + end - begin])
                digests[tensor.name].append(block_checksum(block))
                out.write(block)
        header = Header(file.header_size, 1, SAVE, file.tensors, digests).to_bytes()
        out.seek(0)
        out.write(header)
    return FileEntry(file.name, file.size, bytes_checksum(header), file.header_size, ((0, file.data_size),))


def timed(command: list[str]) -> tuple[float, float]:
    """Seconds of a command, and its peak memory in MB."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return time.perf_counter() - begin, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--format", default="safetensors")
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="consolidate-", dir=asked.folder))
    try:
        source, out = root / "checkpoint-1", root / "out"
        source.mkdir()
        size = make_checkpoint(source, asked.gigabytes)
        ours, peaks, copy, synced = [], [], [], []
        for number in range(asked.rounds):
            for turn in ("ours", "cp") if number % 2 == 0 else ("cp", "ours"):
                drop_cache(source)
                if turn == "ours":
                    command = [sys.executable, "-m", "stepmark", "consolidate", str(source), str(out)]
                    seconds, peak = timed([*command, "-f", asked.format])
                    ours.append(seconds)
                    peaks.append(peak)
                else:
                    seconds, _ = timed(["cp", "-r", str(source), str(out)])
                    copy.append(seconds)
                    synced.append(seconds + timed(["sync", *map(str, out.iterdir())])[0])
                shutil.rmtree(out)
                os.sync()
    finally:
        shutil.rmtree(root)
    print(f"{size / 1e9:.2f} GB, {RANKS} ranks, {asked.format}, {asked.rounds} rounds, {os.cpu_count()} cores")
    print("\n| | GB/s, median | the rounds, s |\n| --- | --- | --- |")
    for name, times in (("stepmark consolidate", ours), ("cp, then sync", synced), ("cp alone", copy)):
        rounds = ", ".join(f"{seconds:.2f}" for seconds in times)
        print(f"| {name} | {size / 1e9 / statistics.median(times):.2f} | {rounds} |")
    for name, times in (("cp, then sync", synced), ("cp alone", copy)):
        ratio = statistics.median(other / mine for other, mine in zip(times, ours, strict=True))
        print(f"\nspeed beside {name}: {ratio:.2f}")
    print(f"\npeak memory: {max(peaks):.0f} MB")


if __name__ == "__main__":
    main()
