"""What a run saves of its model: a Hugging Face folder, and the files of one beside the tensors of a checkpoint."""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.format.checkpoint_folders import COORDINATION, checkpoint_path
from stepmark.checkpoint.format.manifest import MANIFEST, MODEL, WRITTEN
from stepmark.checkpoint.places import BucketPlace
from stepmark.checkpoint.sections import describe
from stepmark.checkpoint.written_form import own_class
from stepmark.data.loader.collate import PadTo
from stepmark.errors import StepmarkError, UsageError
from stepmark.filesystem import files
from stepmark.filesystem.error_advice import with_advice
from stepmark.filesystem.objects import Bucket
from stepmark.filesystem.printable import listed
from stepmark.liveness.host_group import HostGroup
from stepmark.model_folder.consolidate import consolidate, weight_files
from stepmark.model_folder.new_folder import WritingListener
from stepmark.model_folder.output_files import MAX_SHARD, in_memory, write_files
from stepmark.runtime.base import Runtime
from stepmark.runtime.mesh import Mesh
from stepmark.runtime.xla_environment import extracting_graphs, warn_not_saved
from stepmark.sharding.dtensor import is_dtensor, reshard
from stepmark.sharding.layout import Layout, Shard
from stepmark.tensor_files.strided import as_written
from stepmark.trainer.run_folder.adapters import Adapter, saved_module
from stepmark.trainer.run_folder.output_folder import on_rank_0
from stepmark.training.model_labels import accepts

logger = logging.getLogger("stepmark")

_STAGING = ".model"  # in the folder: files that are not complete yet
_SILENT = WritingListener()
_INDEX = "model.safetensors.index.json"
_STAGED = re.compile(r"complete\Z|\.stepmark\Z|\.?checkpoint-0(\.[0-9a-f]+-\d{6})?\Z")
_WEIGHTS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?\Z")


def write_model(
    folder: Path,
    model: nn.Module,
    mesh: Mesh,
    processing_class: Any,
    timeout: float,
    host: HostGroup | None = None,
    state: Mapping[str, Tensor] | None = None,
    place: str | None = None,
) -> None:
    """Writes the complete model under Hugging Face's file names. Each file appears atomically, and weight files of an
    earlier model are removed last. The model does not change. Collective among the mesh's ranks, or those of `host`;
    `timeout`, in seconds, bounds each phase. With `state`, a state dict, its values are written. What ranks hold that
    do not see the folder comes through `place`, the run's in a bucket.

    Raises StepmarkError, on all ranks, where the folder cannot be written.
    """
    runtime, host = mesh.runtime, host or mesh.context.host
    staging = folder / _STAGING

    def prepare() -> None:
        files.make_own_folder(staging)
        _clear(staging)  # of what a run that was killed here has left
        files.make_own_folder(staging)

    on_rank_0(host, prepare, partial(_cannot_write, folder), Exception)
    lost = [name for name, each in type(model).state_dict(model).items() if not isinstance(each, Tensor | Shard)]
    if lost and host.rank == 0:
        what = "is no tensor, which the model's file could hold, so that checkpoints alone have it"
        logger.warning("%s: %s; load the model with strict=False", listed(lost, 5), what)
    sharded = is_sharded(model, mesh)
    if state is None:
        runtime.step_boundary()
    if sharded:
        with Checkpointer(staging, group=host, runtime=runtime, async_save=False, save_timeout=timeout) as checkpointer:
            if place is not None:
                checkpointer.keep_at(f"{place}/{COORDINATION}/model")
            checkpointer.save(0, {"model": model}, model_only=True)
            checkpointer.complete(0)
            divided = checkpointer.divided_for is not None
        if divided and host.rank == 0:
            BucketPlace(Bucket(f"{place}/{COORDINATION}/model")).tidy()
        elif divided and not checkpoint_path(staging, 0).exists():  # on another machine than rank 0's
            with contextlib.suppress(FileNotFoundError):
                _clear(staging)

    def finish() -> None:
        complete = staging / "complete"
        if sharded:
            largest = getattr(model, "largest_file", MAX_SHARD)
            consolidate(checkpoint_path(staging, 0), complete, "safetensors", largest, _SILENT)
        else:
            complete.mkdir()
            _write_weights(complete, model, runtime, state)
        write_model_files(complete, model, processing_class)
        _publish(complete, folder)
        _clear(staging)

    on_rank_0(host, finish, partial(_cannot_write, folder), Exception)


def is_sharded(model: nn.Module, mesh: Mesh) -> bool:
    """Whether ranks hold the model together; what fully_shard has gathered is freed."""
    reshard(model)
    return max(mesh.sharing.values()) > 1 or any(map(is_dtensor, model.parameters()))


def _clear(staging: Path) -> None:
    """Removes what a run makes there, and the folder if nothing else is in it."""
    for path in staging.iterdir():
        if _STAGED.match(path.name):
            files.remove_tree(path)
    with contextlib.suppress(OSError):
        staging.rmdir()


def _write_weights(folder: Path, model: nn.Module, runtime: Runtime, state: Mapping[str, Tensor] | None = None) -> None:
    """Writes the weights of a model that this rank holds completely, or those of a state dict; tied weights once."""
    (section,) = describe({"model": model})
    names = getattr(model, "names", {name: name for name in section.entries})
    for name, entry in section.entries.items():
        if entry.layout != Layout.full(entry.layout.shape):
            why = f"{name} is a shard of {list(entry.layout.shape)}, so that no complete model was written"
            raise StepmarkError(why)
        if state is not None and names[name] not in state:
            raise UsageError(f"state_dict: it has no {names[name]!r}; pass all of model.state_dict(), or leave it out")
    if state is None:
        on_host = runtime.to_host([entry.tensor for entry in section.entries.values()])
    else:
        on_host = [state[names[name]].cpu() for name in section.entries]
    tensors = {name: in_memory(name, tensor) for name, tensor in zip(section.entries, on_host, strict=True)}
    written, largest = as_written(tensors, section.values.get(WRITTEN)), getattr(model, "largest_file", MAX_SHARD)
    write_files(folder, weight_files(written, section.group, "safetensors", largest), (), _SILENT)


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
    if isinstance(error, UsageError):
        return error
    reason = " ".join(str(error).split()) or type(error).__name__
    return StepmarkError(with_advice(f"the model cannot be written to {folder}: {reason}", error))


def write_model_files(folder: Path, model: nn.Module, processing_class: Any) -> None:
    """Writes the files of a Hugging Face model folder except the weights: config, generation config, tokenizer, and
    Python code that came with them. Of an adapter there is only its own config, since one of the base would make a
    model with random weights of the folder."""
    parts: list[Any] = [_config_of(folder, model), getattr(model, "generation_config", None), processing_class]
    if isinstance(model, Adapter):
        model.write_config(folder)
        parts = [processing_class]
    for part in parts:
        if hasattr(part, "save_pretrained"):
            part.save_pretrained(folder)


def _config_of(folder: Path, model: nn.Module) -> Any:
    """The config as `save_pretrained` of a transformers model writes it, whose class and type it names. The modules of
    a class that came with its weights (`trust_remote_code`) are copied and named there, too."""
    from transformers import PreTrainedModel
    from transformers.dynamic_module_utils import custom_object_save

    config: Any = getattr(model, "config", None)
    if not isinstance(model, PreTrainedModel):
        return config
    config = copy.deepcopy(config)
    config.architectures = [own_class(model).__name__]
    config.dtype = str(model.dtype).removeprefix("torch.")
    if model._auto_class is not None:
        custom_object_save(model, folder, config=config)
    return config


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

    def __init__(self, model: nn.Module, mesh: Mesh, output_folder: Path, place: str | None) -> None:
        self.module = saved_module(model)
        self._place = place
        self._mesh = mesh
        self._rank = mesh.context.host.rank
        self._folder = (output_folder / ".save_model").absolute()
        self._taken = (output_folder / ".save_checkpoint").absolute()
        self._waiting: list[Path] = []  # for the next checkpoint
        self._collecting = False

    def write(
        self,
        folder: Path,
        processing_class: Any,
        timeout: float,
        *,
        alone: bool = False,
        state: Mapping[str, Tensor] | None = None,
    ) -> None:
        """As `write_model`, without the weights, which the checkpoint has. Collective, unless rank 0 is `alone`."""
        if self._collecting and folder == self._folder:
            if self._rank == 0:
                write_model_files(folder, self.module, processing_class)
        elif extracting_graphs():
            warn_not_saved(f"the model in {folder}")
        elif alone and is_sharded(self.module, self._mesh):
            raise UsageError("_save: ranks hold the model together; call save_model() on all of them")
        else:
            host = HostGroup() if alone else self._mesh.context.host
            write_model(folder, self.module, self._mesh, processing_class, timeout, host, state, self._place)

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
        self._waiting.append(self._folder)
        self._mesh.context.host.barrier()

    def take(self, folder: Path) -> None:
        """Takes what a user's `_save_checkpoint` has written under the name of the next checkpoint as a part of it."""
        if folder.is_dir() and not (folder / MANIFEST).exists():
            shutil.rmtree(self._taken, ignore_errors=True)
            self._waiting.append(folder.rename(self._taken))

    def add_to(self, checkpoint: Path, processing_class: Any) -> None:
        """Adds the collected files, or else the usual ones, without weights, and those that were taken."""
        if self._folder not in self._waiting:
            write_model_files(checkpoint, self.module, processing_class)
        own = MODEL, getattr(self.module, "tensor_group", MODEL)
        for folder in self._waiting:
            for weights in (path for group in own for path in folder.glob(f"{group}*.safetensors*")):
                weights.unlink(missing_ok=True)
            shutil.copytree(folder, checkpoint, copy_function=shutil.move, dirs_exist_ok=True)
            shutil.rmtree(folder)
        self._waiting.clear()


def saved_processing(processing_class: Any, collator: Any) -> Any:
    """What is saved with the model: `processing_class`, or else that of the collator, as in transformers."""
    if isinstance(collator, PadTo):
        collator = collator.collate_fn
    found = (processing_class, *(getattr(collator, name, None) for name in ("processor", "tokenizer")))
    return next((each for each in found if each is not None), None)
