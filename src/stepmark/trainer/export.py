"""A model's weights as a plain Hugging Face folder has them."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from stepmark.checkpoint.describe import describe
from stepmark.runtime.base import Runtime

MAX_SHARD_SIZE = "5GB"


def write_weights(folder: Path, model: nn.Module, runtime: Runtime) -> None:
    """Writes the weights under Hugging Face's file names, tied ones once. Each file appears whole or not at all, and
    files of an earlier model that this one does not have are removed last. The model is not touched; the step boundary
    before it is the caller's, since every rank has to take part in it."""
    import json

    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    (section,) = describe({"model": model})
    names = list(section.entries)
    on_host = dict(zip(names, runtime.to_host([section.entries[name].tensor for name in names]), strict=True))
    split = split_torch_state_dict_into_shards(on_host, max_shard_size=MAX_SHARD_SIZE)
    before = {path.name for path in folder.glob("model*.safetensors*")}
    for file, tensors in split.filename_to_tensors.items():
        part = folder / f".{file}.part"
        save_file({name: on_host[name].contiguous() for name in tensors}, part, metadata={"format": "pt"})
        _publish(part, folder / file)
    written = set(split.filename_to_tensors)
    if split.is_sharded:
        index = "model.safetensors.index.json"
        part = folder / f".{index}.part"
        part.write_text(json.dumps({"metadata": split.metadata, "weight_map": split.tensor_to_filename}, indent=2))
        _publish(part, folder / index)
        written.add(index)
    for name in before - written:
        (folder / name).unlink()


def _publish(part: Path, final: Path) -> None:
    with open(part, "rb") as file:
        os.fsync(file.fileno())
    part.replace(final)
