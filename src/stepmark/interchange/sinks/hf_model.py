"""Writes the model of a foreign checkpoint as a Hugging Face folder, and an adapter as PEFT's."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stepmark.checkpoint.format.manifest import TensorEntry
from stepmark.filesystem import files
from stepmark.interchange.neuron.lora import PREFIX
from stepmark.interchange.sinks.stepmark_checkpoint import ImportListener
from stepmark.interchange.sources.foreign import ForeignCheckpoint
from stepmark.interchange.tensors.array_reader import ArrayReader
from stepmark.interchange.tensors.file_output import FileOutput
from stepmark.interchange.tensors.streaming import write_tensors
from stepmark.interchange.tensors.verification import RecordChecks
from stepmark.model_folder.model_files import ModelFile, index_of, split_into_files
from stepmark.model_folder.new_folder import check_out, check_room, writing
from stepmark.model_folder.writers import THREADS, make_header, run_jobs
from stepmark.sharding.layout import TensorSlice

MAX_SHARD = 5_000_000_000
ADAPTER = "adapter_model.safetensors"


def write_model_folder(
    source: ForeignCheckpoint, out: Path, listener: ImportListener, max_shard: int = MAX_SHARD
) -> int:
    """Writes the folder, in files of at most `max_shard` bytes of tensors; returns the bytes of its tensors.

    Raises as `write_checkpoint` does.
    """
    final = check_out(out, source.folder)
    for tensor in source.model.values():
        tensor.check()
    entries = {
        name: TensorEntry(tensor.dtype, tensor.shape, ((0, TensorSlice.full(tensor.shape)),))
        for name, tensor in source.model.items()
    }
    adapter = {name: entry for name, entry in entries.items() if source.adapter and name.startswith(PREFIX)}
    base = {name: entry for name, entry in entries.items() if name not in adapter}
    shards = split_into_files(base, "safetensors", max_shard) if base else []
    index = index_of(shards, "safetensors") if len(shards) > 1 else None
    shards += [ModelFile(ADAPTER, adapter)] if adapter else []
    size = sum(shard.size for shard in shards)
    check_room(final.parent, size)
    with writing(final, out) as temporary:
        listener.begin(size)
        _write_shards(source, temporary, shards, listener)
        if index is not None:
            files.write_file(temporary / index[0], index[1])
        for name, path in source.files.items():
            shutil.copyfile(path, temporary / name)
            files.sync_file(temporary / name)
        for name, data in source.texts.items():
            files.write_file(temporary / name, data)
    return size


def _write_shards(source: ForeignCheckpoint, folder: Path, shards: list[ModelFile], listener: ImportListener) -> None:
    checks = RecordChecks(source.records)
    with (
        ThreadPoolExecutor(THREADS, thread_name_prefix="stepmark-import") as pool,
        ArrayReader(checks.observe) as reader,
    ):
        for shard in shards:
            path = folder / shard.name
            places = make_header(path, shard.tensors)
            targets = [(source.model[name], places[name]) for name in shard.tensors]
            with FileOutput(path, path.stat().st_size) as output:
                run_jobs(pool, write_tensors(output, reader, checks, targets), listener.advance)
                output.sync()
        run_jobs(pool, checks.rest(), listener.advance)
