"""Writes a live model as a plain Hugging Face folder: weights, config and tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.format.checkpoint_folders import checkpoint_path
from stepmark.checkpoint.sections import describe
from stepmark.errors import StepmarkError
from stepmark.filesystem import files
from stepmark.filesystem.error_advice import with_advice
from stepmark.liveness.host_group import HostGroup
from stepmark.model_folder.consolidate import UNLIMITED, ConsolidationListener, consolidate
from stepmark.runtime.base import Runtime
from stepmark.runtime.mesh import Mesh
from stepmark.trainer.run_folder.adapters import Adapter
from stepmark.trainer.run_folder.outputs import write_model_files

MAX_SHARD_SIZE = 5 * 10**9  # bytes
_STAGING = ".model"  # in the folder: files that are not complete yet
_SILENT = ConsolidationListener(lambda size: None, lambda size: None, lambda text: None)
_INDEX = "model.safetensors.index.json"


def write_model(folder: Path, model: nn.Module, mesh: Mesh, processing_class: Any, timeout: float) -> None:
    """Writes the complete model under Hugging Face's file names. Each file appears atomically, and weight files of an
    earlier model are removed last. The model does not change. Collective; `timeout`, in seconds, bounds each phase.

    Raises StepmarkError, on all ranks, where the folder cannot be written.
    """
    runtime, host = mesh.runtime, mesh.context.host
    staging = folder / _STAGING

    def prepare() -> None:
        staging.mkdir(parents=True, exist_ok=True)
        for leftover in staging.iterdir():  # by a run that was killed here
            shutil.rmtree(leftover)

    _on_first(host, folder, prepare)
    runtime.step_boundary()
    sharded = mesh.tensor_parallel.size > 1 or mesh.pipeline.size > 1
    if sharded:
        with Checkpointer(staging, group=host, runtime=runtime, async_save=False, save_timeout=timeout) as checkpointer:
            checkpointer.save(0, {"model": model}, model_only=True)

    def finish() -> None:
        complete = staging / "complete"
        if sharded:
            consolidate(checkpoint_path(staging, 0), complete, "safetensors", _largest_file(model), _SILENT)
        else:
            complete.mkdir()
            _write_weights(complete, model, runtime)
        _publish(complete, folder)
        write_model_files(folder, model, processing_class)
        shutil.rmtree(staging)

    _on_first(host, folder, finish)


def _largest_file(model: nn.Module) -> int:
    """Bytes of tensors in one file; peft reads only one."""
    return UNLIMITED if isinstance(model, Adapter) else MAX_SHARD_SIZE


def _write_weights(folder: Path, model: nn.Module, runtime: Runtime) -> None:
    """Writes the weights of a model that this rank holds completely; tied weights once."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    (section,) = describe({"model": model})
    names = list(section.entries)
    on_host = dict(zip(names, runtime.to_host([section.entries[name].tensor for name in names]), strict=True))
    pattern = section.group + "{suffix}.safetensors"
    split = split_torch_state_dict_into_shards(on_host, filename_pattern=pattern, max_shard_size=_largest_file(model))
    for file, tensors in split.filename_to_tensors.items():
        save_file({name: on_host[name].contiguous() for name in tensors}, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        content = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / _INDEX).write_text(json.dumps(content, indent=2))


def _publish(source: Path, folder: Path) -> None:
    """Moves the weights in `source` to `folder`, the index last, and removes those of an earlier model."""
    before = {path.name for path in folder.glob("model*.safetensors*")}
    names = sorted((path.name for path in source.iterdir()), key=lambda name: (name == _INDEX, name))
    permissions = files.usual_permissions(source)  # safetensors gives its files to their owner alone
    for name in names:
        files.set_permissions(source / name, permissions)
        files.sync_file(source / name)
        (source / name).replace(folder / name)
    for name in before.difference(names):
        (folder / name).unlink()


def _on_first(host: HostGroup, folder: Path, work: Callable[[], None]) -> None:
    """Does the work on rank 0; if it fails there, all ranks raise StepmarkError."""
    problem: str | None = None
    cause: Exception | None = None
    if host.rank == 0:
        try:
            work()
        except Exception as error:  # safetensors and tokenizers have their own kinds for a full disk
            reason = " ".join(str(error).split()) or type(error).__name__
            problem, cause = with_advice(f"the model cannot be written to {folder}: {reason}", error), error
    problem = host.broadcast(problem)
    if problem is not None:
        raise StepmarkError(problem) from cause
