"""Writes one file of a model: safetensors streamed from shards to file, or torch.save of tensors held in memory."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

from stepmark.checkpoint.format.dtypes import item_size
from stepmark.checkpoint.format.manifest import TensorEntry
from stepmark.checkpoint.format.tensor_file import PAGE
from stepmark.errors import CheckpointError
from stepmark.filesystem import files
from stepmark.model_folder.gather import GatherTarget, Job, StoredShard, jobs
from stepmark.model_folder.model_files import tensor_bytes
from stepmark.sharding.layout import Layout

if TYPE_CHECKING:
    from stepmark.checkpoint.restore.tensor_reader import TensorReader

Tensors = Mapping[str, TensorEntry]
Advance = Callable[[int], None]  # called with the number of bytes that were written

THREADS = 4
AHEAD = 4 * THREADS  # jobs given to the threads at a time


def write_safetensors(
    path: Path,
    tensors: Tensors,
    sources: Mapping[str, Sequence[StoredShard]],
    pool: ThreadPoolExecutor,
    advance: Advance,
) -> None:
    """Writes a safetensors file, a few megabytes of each thread at a time; the file is not synced.

    Raises CheckpointDamaged where a shard differs from its checksums or a tensor is incomplete.
    """
    places = make_header(path, tensors)
    descriptor = files.open_for_writing(path)
    try:
        targets = [GatherTarget(name, tensor, descriptor, places[name]) for name, tensor in tensors.items()]
        run_jobs(pool, (job for target in targets for job in jobs(target, sources[target.name])), advance)
    finally:
        files.close(descriptor)


def write_pytorch(path: Path, tensors: Tensors, reader: TensorReader, group: str, advance: Advance) -> None:
    """Writes a file as torch.save does. All its tensors are in memory at once; the file is not synced.

    Raises CheckpointDamaged where a shard differs from its checksums or a tensor is incomplete.
    """
    import torch

    from stepmark.checkpoint.restore.tensor_reader import ReadTarget
    from stepmark.runtime.device import runtime_for

    runtime = runtime_for(torch.device("cpu"))
    state: dict[str, torch.Tensor | None] = {}
    for name, tensor in tensors.items():
        target = ReadTarget(group, name, Layout.full(tensor.shape), tensor.dtype)
        reader.fill([target], runtime)
        state[name] = target.host
        advance(tensor_bytes(tensor))
    try:
        torch.save(state, path)
    except RuntimeError as error:  # torch's writer raises it for errors of the file system
        raise CheckpointError(f"{path} cannot be written: {error}") from error


def make_header(path: Path, tensors: Tensors) -> dict[str, int]:
    """Makes a safetensors file whose tensors are holes; returns the byte of the file at which each begins.

    Larger elements come first, and the data begin at a page, so that every tensor is aligned to its elements.
    """
    places, position = {}, 0
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, tensor in sorted(tensors.items(), key=lambda item: -item_size(item[1].dtype)):
        end = position + tensor_bytes(tensor)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        places[name], position = position, end
    text = json.dumps(header, separators=(",", ":")).encode()
    size = (8 + len(text) + PAGE - 1) // PAGE * PAGE
    files.write_file(path, struct.pack("<Q", size - 8) + text.ljust(size - 8), durable=False)
    os.truncate(path, size + position)
    return {name: size + place for name, place in places.items()}


def run_jobs(pool: ThreadPoolExecutor, work: Iterable[Job], advance: Advance) -> None:
    """Runs all jobs, a few ahead of those that are done. When it returns or raises, none is running."""
    remaining: Iterator[Job] = iter(work)
    pending: set[Future[int]] = set()
    try:
        while True:
            while len(pending) < AHEAD and (job := next(remaining, None)) is not None:
                pending.add(pool.submit(job))
            if not pending:
                return
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                advance(future.result())
    finally:
        for future in pending:
            future.cancel()
        wait(pending)
