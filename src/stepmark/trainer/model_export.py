"""A model as a plain Hugging Face folder, while it trains: weights, config and tokenizer."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.format.directory import checkpoint_path
from stepmark.checkpoint.sections import describe
from stepmark.errors import StepmarkError
from stepmark.interchange.consolidate import ConsolidationListener, consolidate
from stepmark.runtime.base import Runtime
from stepmark.runtime.host_group import HostGroup
from stepmark.runtime.mesh import Mesh
from stepmark.trainer.outputs import write_model_files

MAX_SHARD_SIZE = "5GB"
_PARTS = ".model"  # in the folder: what is not whole yet
_SILENT = ConsolidationListener(lambda size: None, lambda size: None, lambda text: None)
_INDEX = "model.safetensors.index.json"


def write_model(folder: Path, model: nn.Module, mesh: Mesh, processing_class: Any, timeout: float) -> None:
    """Writes the model, whole, under Hugging Face's file names. Each file appears whole or not at all, and files of
    weights that this model does not have are removed last. The model is not touched. Collective; `timeout`, in seconds,
    is for each phase of it.

    Raises StepmarkError, on all ranks, where the folder cannot be written.
    """
    runtime, host = mesh.runtime, mesh.context.host
    parts = folder / _PARTS

    def prepare() -> None:
        parts.mkdir(parents=True, exist_ok=True)
        for left in parts.iterdir():  # by a run that was killed here
            shutil.rmtree(left)

    _on_first(host, folder, prepare)
    runtime.step_boundary()
    if mesh.tensor_parallel.size > 1:
        with Checkpointer(parts, group=host, runtime=runtime, async_save=False, save_timeout=timeout) as checkpointer:
            checkpointer.save(0, {"model": model}, model_only=True)

    def finish() -> None:
        whole = parts / "whole"
        if mesh.tensor_parallel.size > 1:
            consolidate(checkpoint_path(parts, 0), whole, "safetensors", 5 * 10**9, _SILENT)
        else:
            whole.mkdir()
            _write_weights(whole, model, runtime)
        _publish(whole, folder)
        write_model_files(folder, model, processing_class)
        shutil.rmtree(parts)

    _on_first(host, folder, finish)


def _write_weights(folder: Path, model: nn.Module, runtime: Runtime) -> None:
    """The weights of a model that this rank holds whole, tied ones once."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    (section,) = describe({"model": model})
    names = list(section.entries)
    on_host = dict(zip(names, runtime.to_host([section.entries[name].tensor for name in names]), strict=True))
    split = split_torch_state_dict_into_shards(on_host, max_shard_size=MAX_SHARD_SIZE)
    for file, tensors in split.filename_to_tensors.items():
        save_file({name: on_host[name].contiguous() for name in tensors}, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        content = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / _INDEX).write_text(json.dumps(content, indent=2))


def _publish(source: Path, folder: Path) -> None:
    """Moves the weights in `source` to `folder`, the index last, and removes those of an earlier model."""
    before = {path.name for path in folder.glob("model*.safetensors*")}
    names = sorted((path.name for path in source.iterdir()), key=lambda name: (name == _INDEX, name))
    for name in names:
        with open(source / name, "rb") as file:
            os.fsync(file.fileno())
        (source / name).replace(folder / name)
    for name in before.difference(names):
        (folder / name).unlink()


def _on_first(host: HostGroup, folder: Path, work: Callable[[], None]) -> None:
    """Does the work on rank 0; where it fails there, all ranks fail."""
    problem: str | None = None
    cause: Exception | None = None
    if host.rank == 0:
        try:
            work()
        except (OSError, StepmarkError) as error:
            problem, cause = f"the model cannot be written to {folder}: {error}", error
    problem = host.broadcast(problem)
    if problem is not None:
        raise StepmarkError(problem) from cause
