"""Programs for ranks that save and restore models on meshes, and checksums of what is in their checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from stepmark import Checkpointer
from stepmark.checkpoint.format.manifest import Manifest, TensorEntry, read_manifest
from stepmark.checkpoint.format.verified_file import VerifiedFile
from stepmark.runtime.context import start
from tests.support.models import build, training

STEPS = 2


def save(folder: str, options: dict[str, Any]) -> dict[str, int]:
    """Trains a few steps on the mesh of `options` (see models.training) and saves; returns the number of files, and of
    the shards of the tensor that has most."""
    context = start(options.get("device", "cpu"))
    step, batches = training(context, options, build(**options["model"]))
    for number in range(STEPS):
        step(number, next(batches))
    _save(Path(folder), context, step)
    manifest = read_manifest(Path(folder) / "checkpoint-1")
    slices = [len(tensor.slices) for group in manifest.tensors.values() for tensor in group.values()]
    return {"files": len(manifest.files), "slices": max(slices)}


def restore(folders: list[str], again: str, options: dict[str, Any]) -> list[list[list[float]]]:
    """Restores each of the checkpoints on the mesh of `options`, saves it again under `again`, and trains on; loss,
    tokens and gradient norm of these steps."""
    context = start(options.get("device", "cpu"))
    found = []
    for folder in folders:
        step, batches = training(context, options, build(**options["model"]))
        for parameter in step.model.parameters():
            parameter.data.zero_()
        with Checkpointer(Path(folder), group=context.host, runtime=context.runtime) as checkpointer:
            assert checkpointer.restore({"model": step.model, "optimizer": step.optimizer}) == 1
        _save(Path(again) / Path(folder).name, context, step)
        losses = []
        for number in range(STEPS):
            statistics = step(STEPS + number, next(batches))
            losses += [values.tolist() for values in context.runtime.to_host([statistics.values])]
        found.append(losses)
    return found


def _save(folder: Path, context: Any, step: Any) -> None:
    with Checkpointer(folder, group=context.host, runtime=context.runtime) as checkpointer:
        state = {"model": step.model, "optimizer": step.optimizer}
        checkpointer.save(1, state, files=step.model.config.save_pretrained).result()


def checksums(checkpoint: Path) -> dict[str, str]:
    """Each global tensor's dtype and shape, and the checksum of its bytes in row-major order, whatever its shards."""
    manifest = read_manifest(checkpoint)
    found = {}
    for group, tensors in manifest.tensors.items():
        for name, entry in tensors.items():
            data = _whole(checkpoint, manifest, name, entry)
            found[f"{group}/{name}"] = f"{entry.dtype} {list(entry.shape)} {xxhash.xxh3_128_hexdigest(data)}"
    return found


def _whole(checkpoint: Path, manifest: Manifest, name: str, entry: TensorEntry) -> bytes:
    whole: Any = None
    for index, tensor_slice in entry.slices:
        file = VerifiedFile(checkpoint, manifest, manifest.files[index])
        stored = file.tensor(name, entry.dtype, tensor_slice)
        data = np.frombuffer(bytes(file.read([stored], stored.begin, stored.end)), np.uint8)
        data = data.reshape(tensor_slice.numel, -1)
        if whole is None:
            whole = np.zeros((*entry.shape, data.shape[1]), np.uint8)
        for block in tensor_slice.blocks():
            box = block.box
            there = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))
            end = block.start + math.prod(box.lengths)
            whole[there] = data[block.start : end].reshape(*box.lengths, -1)
    return whole.tobytes()
