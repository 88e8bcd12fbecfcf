"""Writes the model of a foreign checkpoint as a Hugging Face folder, and an adapter as PEFT's."""

from __future__ import annotations

from pathlib import Path

from stepmark.interchange.neuron.lora import PREFIX
from stepmark.interchange.sources.foreign import ForeignCheckpoint
from stepmark.model_folder.adapted_model import ADAPTER_WEIGHTS
from stepmark.model_folder.new_folder import WritingListener, check_out
from stepmark.model_folder.output_files import MAX_SHARD, DataFile, copied_files, model_files, tensor_file, write_folder
from stepmark.tensor_files.strided import as_written


def write_model_folder(
    source: ForeignCheckpoint,
    out: Path,
    listener: WritingListener,
    max_shard: int = MAX_SHARD,
    form: str = "safetensors",
) -> int:
    """Writes the folder, its model in files of this form, of at most `max_shard` bytes; returns the tensors' bytes.

    Raises as `write_checkpoint` does.
    """
    final = check_out(out, source.folder)
    for tensor in source.model.values():
        tensor.check()
    adapter = {name: tensor for name, tensor in source.model.items() if source.adapter and name.startswith(PREFIX)}
    base = {name: tensor for name, tensor in source.model.items() if name not in adapter}
    planned = model_files(as_written(base, source.written), max_shard, form) if base else []
    planned += [tensor_file(ADAPTER_WEIGHTS, adapter)] if adapter else []
    planned += [*copied_files(source.files), *(DataFile(name, data) for name, data in source.texts.items())]
    return write_folder(planned, source.records, final, out, listener)
