"""What a run saves of its model: a Hugging Face folder, and the files of one beside the tensors of a checkpoint."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.format.checkpoint_folders import checkpoint_path
from stepmark.checkpoint.format.manifest import MODEL
from stepmark.checkpoint.sections import describe
from stepmark.data.loader.collate import PadTo
from stepmark.errors import StepmarkError
from stepmark.filesystem import files
from stepmark.filesystem.error_advice import with_advice
from stepmark.model_folder.consolidate import UNLIMITED, consolidate, weight_files
from stepmark.model_folder.new_folder import WritingListener
from stepmark.model_folder.output_files import MAX_SHARD, in_memory, write_files
from stepmark.runtime.base import Runtime
from stepmark.runtime.mesh import Mesh
from stepmark.runtime.xla_environment import extracting_graphs, warn_not_saved
from stepmark.sharding.dtensor import is_dtensor, reshard
from stepmark.sharding.layout import Layout
from stepmark.trainer.compat.overrides import accepts
from stepmark.trainer.run_folder.adapters import Adapter, saved_module
from stepmark.trainer.run_folder.output_folder import on_rank_0

_STAGING = ".model"  # in the folder: files that are not complete yet
_SILENT = WritingListener()
_INDEX = "model.safetensors.index.json"
_STAGED = re.compile(r"complete\Z|\.stepmark\Z|\.?checkpoint-0(\.[0-9a-f]+-\d{6})?\Z")
_WEIGHTS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?\Z")


def write_model(folder: Path, model: nn.Module, mesh: Mesh, processing_class: Any, timeout: float) -> None:
    """Writes the complete model under Hugging Face's file names. Each file appears atomically, and weight files of an
    earlier model are removed last. The model does not change. Collective; `timeout`, in seconds, bounds each phase.

    Raises StepmarkError, on all ranks, where the folder cannot be written.
    """
    runtime, host = mesh.runtime, mesh.context.host
    staging = folder / _STAGING

    def prepare() -> None:
        files.make_own_folder(staging)
        _clear(staging)  # of what a run that was killed here has left
        files.make_own_folder(staging)

    on_rank_0(host, prepare, partial(_cannot_write, folder))
    runtime.step_boundary()
    reshard(model)
    divided = any(map(is_dtensor, model.parameters()))
    sharded = divided or mesh.tensor_parallel.size * mesh.pipeline.size * mesh.expert_parallel_size > 1
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
        write_model_files(complete, model, processing_class)
        _publish(complete, folder)
        _clear(staging)

    on_rank_0(host, finish, partial(_cannot_write, folder))


def _clear(staging: Path) -> None:
    """Removes what a run makes there, and the folder if nothing else is in it."""
    for path in staging.iterdir():
        if _STAGED.match(path.name):
            files.remove_tree(path)
    with contextlib.suppress(OSError):
        staging.rmdir()


def _largest_file(model: nn.Module) -> int:
    """Bytes of tensors in one file; peft reads only one."""
    return UNLIMITED if isinstance(model, Adapter) else MAX_SHARD


def _write_weights(folder: Path, model: nn.Module, runtime: Runtime) -> None:
    """Writes the weights of a model that this rank holds completely; tied weights once."""
    (section,) = describe({"model": model})
    for name, entry in section.entries.items():
        if entry.layout != Layout.full(entry.layout.shape):
            raise StepmarkError(
                f"{name} is a shard of {list(entry.layout.shape)}, so that no complete model was written"
            )
    on_host = runtime.to_host([entry.tensor for entry in section.entries.values()])
    tensors = {name: in_memory(name, tensor) for name, tensor in zip(section.entries, on_host, strict=True)}
    write_files(folder, weight_files(tensors, section.group, "safetensors", _largest_file(model)), (), _SILENT)


def _publish(source: Path, folder: Path) -> None:
    """Moves the files in `source` to `folder`, the index last, and removes weights of an earlier model."""
    before = {path.name for path in folder.iterdir() if _WEIGHTS.match(path.name)}
    names = sorted(files.regular_files(source), key=lambda name: (name == _INDEX, name))
    for name in names:
        files.sync_file(source / name)
        if "/" in name:
            files.make_own_folder((folder / name).parent)
        (source / name).replace(folder / name)
    for name in before.difference(names):
        (folder / name).unlink()


def _cannot_write(folder: Path, error: Exception) -> StepmarkError:
    """safetensors and tokenizers have their own exceptions for a full disk."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return StepmarkError(with_advice(f"the model cannot be written to {folder}: {reason}", error))


def write_model_files(folder: Path, model: nn.Module, processing_class: Any) -> None:
    """Writes the files of a Hugging Face model folder except the weights: config, generation config, tokenizer, and
    Python code that came with them. Of an adapter there is only its own config, since one of the base would make a
    model with random weights of the folder."""
    parts: list[Any] = [getattr(model, "config", None), getattr(model, "generation_config", None), processing_class]
    if isinstance(model, Adapter):
        model.write_config(folder)
        parts = [processing_class]
    elif getattr(model, "_auto_class", None) is not None:
        _save_code(folder, model)
    for part in parts:
        if hasattr(part, "save_pretrained"):
            part.save_pretrained(folder)


def _save_code(folder: Path, model: nn.Module) -> None:
    """Copies the modules of a model class that came with its weights (`trust_remote_code`), and names them in its
    config, as transformers' `save_pretrained` of the model does; the other parts do so themselves."""
    from transformers.dynamic_module_utils import custom_object_save

    config: Any = model.config
    custom_object_save(model, folder, config=config)


@contextlib.contextmanager
def own_storages(model: nn.Module) -> Iterator[None]:
    """Inside the block, tensors in state dicts of the model and its parts are complete storages, which safetensors
    asks for: those of ZeRO-1 are views of a bucket."""

    def copy(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        views = {name: each for name, each in state.items() if each.untyped_storage().nbytes() != each.nbytes}
        copies = {each.data_ptr(): each.clone() for each in views.values()}  # one of tied weights
        state.update({name: copies[each.data_ptr()] for name, each in views.items()})

    handles = [module._register_state_dict_hook(copy) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class SavedModel:
    """What a run saves of its model. `module` is the section of checkpoints: the model, or its adapter.

    A user's `save_model` writes the files that a checkpoint gets into a folder inside the run's, before the save.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, output_folder: Path) -> None:
        self.module = saved_module(model)
        self._mesh = mesh
        self._rank = mesh.context.host.rank
        self._folder = (output_folder / ".save_model").absolute()
        self._collecting = self._collected = False

    def write(self, folder: Path, processing_class: Any, timeout: float) -> None:
        """As `write_model`; into the folder for a checkpoint without weights, which that has. Collective."""
        if self._collecting and folder == self._folder:
            if self._rank == 0:
                write_model_files(folder, self.module, processing_class)
        elif extracting_graphs():
            warn_not_saved(f"the model in {folder}")
        else:
            write_model(folder, self.module, self._mesh, processing_class, timeout)

    def collect(self, save_model: Callable[..., None]) -> None:
        """Calls a user's `save_model`, which takes a folder, to write into an empty one. Collective."""
        if self._rank == 0:
            files.remove_tree(self._folder)
            files.make_own_folder(self._folder)
        self._mesh.context.host.barrier()
        self._collecting = True
        try:
            save_model(str(self._folder), **({"_internal_call": True} if accepts(save_model, "_internal_call") else {}))
        finally:
            self._collecting = False
        self._collected = True
        self._mesh.context.host.barrier()

    def add_to(self, checkpoint: Path, processing_class: Any) -> None:
        """Adds the files to a checkpoint: those that were collected for it but the weights, or the usual ones."""
        if not self._collected:
            write_model_files(checkpoint, self.module, processing_class)
            return
        own = MODEL, getattr(self.module, "tensor_group", MODEL)
        for path in self._folder.iterdir():
            if not any(path.match(f"{each}*.safetensors*") for each in own):
                shutil.move(path, checkpoint / path.name)
        shutil.rmtree(self._folder)
        self._collected = False


def saved_processing(processing_class: Any, collator: Any) -> Any:
    """What is saved with the model: `processing_class`, or else that of the collator, as in transformers."""
    if isinstance(collator, PadTo):
        collator = collator.collate_fn
    found = (processing_class, *(getattr(collator, name, None) for name in ("processor", "tokenizer")))
    return next((each for each in found if each is not None), None)
