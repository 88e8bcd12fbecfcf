"""Saves and loads state dicts with the conventions of torch.distributed.checkpoint (DCP), as Stepmark checkpoints.

`from stepmark.checkpoint import dcp` takes the place of `import torch.distributed.checkpoint as dcp` for `save`,
`async_save` and `load`. A folder with the name of a checkpoint is complete, or not there.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from stepmark.checkpoint.checkpointer import APART, MARGIN, Checkpointer
from stepmark.checkpoint.downloads import checkpoint_copy
from stepmark.checkpoint.format.checkpoint_folders import checkpoint_path, resolve_link, saving_folder
from stepmark.checkpoint.format.manifest import MANIFEST, read_manifest, save_of
from stepmark.checkpoint.host_memory import StagingMemory
from stepmark.checkpoint.operation import SaveHandle
from stepmark.checkpoint.places import BucketPlace, FolderPlace, copy_checkpoint, place_of
from stepmark.checkpoint.restore.restore import Restorer
from stepmark.checkpoint.state_dicts import SavedStateDict, StateDict, compare_state_dict, in_order, is_stateful
from stepmark.errors import CheckpointDamaged, CheckpointMismatch, CheckpointNotFound, UsageError
from stepmark.filesystem import files
from stepmark.filesystem.cache_folder import working_folder
from stepmark.filesystem.local_paths import address_of
from stepmark.filesystem.objects import Bucket
from stepmark.liveness.failure_report import describe_error
from stepmark.liveness.host_group import HostGroup
from stepmark.liveness.status_board import UnsharedStore

logger = logging.getLogger("stepmark")

_METADATA = ".metadata"  # of a checkpoint of DCP's
_NUMBER = re.compile(r"\d{1,18}\Z")
_PLANNERS = "torch.distributed.checkpoint.default_planner"
_DEFAULT_PLANNERS = (f"{_PLANNERS}.DefaultSavePlanner", f"{_PLANNERS}.DefaultLoadPlanner")
_STORAGE = ("storage_writer", "storage_reader")
_OTHERS = {"storage_writer", "storage_reader", "planner", "async_stager", "async_checkpointer_type", "use_collectives"}
_NEUTRAL = ("None", "True", "AsyncCheckpointerType.THREAD")  # values of these arguments that ask for nothing
_savers: dict[Any, _Saver] = {}  # by process and process group
atexit.register(_savers.clear)  # a process group that is kept until the interpreter exits may abort it


def save(
    state_dict: Mapping[str, Any],
    storage_writer: Any = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    **refused: Any,
) -> Path:
    """Saves a state dict as the folder `checkpoint_id`; collective. Returns once it is durable.

    Where ranks have different values under one name, one rank's is saved, and a warning names them: rename them.

    Args:
        state_dict: Nested dicts and lists of tensors, DTensors and plain values. What has `state_dict` and
            `load_state_dict` is saved as what the first of them gives.
        storage_writer: Refused, unless None: `checkpoint_id` says where.
        checkpoint_id: The folder, or an address (`s3://…`), to which rank 0 uploads it. A checkpoint there is replaced
            in one step. Its step is the number at the end of the name, or 0.
        process_group: The ranks that save together. Default: all.
        no_dist: Whether this process saves alone. Default: False, where torch.distributed is initialized.
        refused: Other arguments of DCP's, which are refused unless they ask for what is done anyway.

    Returns:
        The checkpoint's path; of an address, that of its copy in the cache until the next save.

    Raises:
        UsageError: An argument is refused, or the state cannot be saved.
        CheckpointBusy: Another live process saves to this folder.
        CheckpointError: The save has failed on any rank.
    """
    path = async_save(
        state_dict, storage_writer, checkpoint_id=checkpoint_id, process_group=process_group, no_dist=no_dist, **refused
    ).result()
    with _saver(process_group, no_dist).next_call():  # which frees what was frozen
        return path


def async_save(
    state_dict: Mapping[str, Any],
    storage_writer: Any = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    **refused: Any,
) -> Future[Path]:
    """Like `save`, but returns once the state is copied, and writes in the background. Waits for the save before.

    Returns:
        A future; its `result()` waits until the checkpoint is durable, and raises where the save has failed.
    """
    _check_refused({"storage_writer": storage_writer, **refused})
    with _saver(process_group, no_dist).next_call() as saver:
        return saver.begin(*_folder(checkpoint_id), SavedStateDict(state_dict))


def load(
    state_dict: dict[str, Any],
    storage_reader: Any = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    planner: Any = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    **refused: Any,
) -> None:
    """Gives a state dict the values of a checkpoint, in place; collective. Any Stepmark checkpoint can be loaded.

    Tensors are filled, and keep their dtypes; other values are replaced; what has `load_state_dict` gets the result.
    The checkpoint may have more. It need not have been saved with this mesh, number of ranks or device.

    Args:
        state_dict: As for `save`.
        storage_reader: Refused, unless None.
        checkpoint_id: The checkpoint's folder, or its address; each node downloads it to its cache.
        planner: A DefaultLoadPlanner, of which `allow_partial_load` counts: then the checkpoint may have less, too.
        process_group: The ranks that load together. Default: all.
        no_dist: Whether this process loads alone. Default: False, where torch.distributed is initialized.
        refused: Other arguments of DCP's, which are refused unless they ask for what is done anyway.

    Raises:
        UsageError: An argument is refused.
        CheckpointNotFound: There is no checkpoint.
        CheckpointMismatch: It lacks a name, or has another shape; nothing is changed. Or it is one of DCP's.
        CheckpointDamaged: It is corrupted.
        CheckpointError: The file system cannot read it.
    """
    _check_refused({"storage_reader": storage_reader, "planner": planner, **refused})
    state, allow_partial = StateDict(state_dict), getattr(planner, "allow_partial_load", False)
    path, address = _folder(checkpoint_id)
    path = checkpoint_copy(address) if address else path
    with _saver(process_group, no_dist).next_call() as saver:
        saver.load(path, state, allow_partial=allow_partial)
    for key, value in in_order(state_dict):
        if is_stateful(value):
            value.load_state_dict(state.live[key])
        else:
            state_dict[key] = state.live[key]


class _Saver(Checkpointer):
    """Saves and loads with the same ranks, each time another folder."""

    def __init__(self, group: HostGroup) -> None:
        super().__init__(os.devnull, group=group)  # until the first save
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stepmark-dcp")
        self._last: list[Future[Path]] = []
        self._calls = threading.RLock()
        self._uploaded: Path | None = None  # the last checkpoint that was uploaded

    @contextlib.contextmanager
    def next_call(self) -> Iterator[_Saver]:
        """A call of one thread, once the save before has ended, of which it frees what was frozen."""
        with self._calls:
            wait(self._last)
            super().wait()
            yield self

    def wait(self) -> None:
        """Frees nothing, since it is called behind training, too: see save/snapshot.py."""
        with self._one_call():
            self._background.wait()

    def begin(self, path: Path, address: str | None, state: SavedStateDict) -> Future[Path]:
        """Saves in the background. Raises UsageError where ranks have different paths."""
        own = address or str(path)
        for rank, other in enumerate(self._timed_group.all_gather(own, "beginning a save")):
            if other != own:
                raise UsageError(f"checkpoint_id: {own} on this rank is {other} on rank {rank}; save to one folder")
        self.folder, self._address = saving_folder(path), address
        self._place = None if address is None else place_of(address)[0].address
        state.compared = self._group.size > 1
        step = int((_NUMBER.search(path.name) or "0")[0])
        try:
            handle = self.save(step, state, files=lambda _: _check_replaceable(path), block=False)
        except BaseException:
            self._end()
            raise
        self._last = [self._thread.submit(self._finish, handle)]
        return self._last[0]

    def _open_place(self, divided_for: str | None) -> None:
        """The place is claimed for the upload alone."""

    def _upload(self, step: int) -> None:
        (place, _), last = place_of(str(self._address)), self._uploaded
        assert isinstance(place, BucketPlace)
        with place.owning():
            copy_checkpoint(FolderPlace(self.folder), place, step, replaces=True)
            place.tidy(step)
        self._uploaded = checkpoint_path(self.folder, step)
        if last not in (None, self._uploaded):
            files.remove_tree(last)

    def _finish(self, handle: SaveHandle) -> Path:
        try:
            return handle.result()
        except Exception as error:  # the program may not ask for it
            logger.error("%s", describe_error(error))
            raise
        finally:
            self._end()

    def _end(self) -> None:
        """Releases the folder, and removes it; keeps the memory for the next save, and lets updates free the frozen."""
        owned, memory, self._memory = self._ownership and self._ownership.is_first, self._memory, StagingMemory()
        hook, self._hook = self._hook, None
        self.close()
        self._memory, self._hook = memory, hook
        if owned:
            with contextlib.suppress(OSError):  # another process is about to save there
                files.remove_tree(self.folder)

    def load(self, path: Path, state: StateDict, *, allow_partial: bool) -> None:
        """Loads in place. Raises CheckpointMismatch, CheckpointDamaged or CheckpointNotFound."""
        group, alone = self._timed_group, self._group.size == 1
        board = UnsharedStore(path, self._group.rank)
        load = self._attempt(f"load of {path}", f"nothing was loaded from {path}", board)
        with self._one_call(), load as operation, self._lease_on(path):
            compare = partial(compare_state_dict, allow_partial=allow_partial)
            restorer = Restorer(group, operation, 4, alone, self._timestamps, compare=compare)
            tried: list[str | None] = []
            while True:
                save = group.ask_first(partial(_save_to_load, path), f"looking for {path}")
                try:
                    restorer.named(path, state)
                    return
                except CheckpointDamaged:
                    if save in tried:  # else another process may have replaced it in the meantime
                        raise
                    tried.append(save)


def _saver(process_group: dist.ProcessGroup | None, no_dist: bool) -> _Saver:
    alone = no_dist or not dist.is_available() or not dist.is_initialized()
    key = (os.getpid(), *((None, None) if alone else (dist.group.WORLD, process_group)))  # a fork has no threads
    for other in [other for other in _savers if not alone and other[1] not in (None, dist.group.WORLD)]:
        _savers.pop(other).close()  # of an earlier initialization
    if key not in _savers:
        timeout = timedelta(seconds=APART + MARGIN)
        _savers[key] = _Saver(HostGroup() if alone else HostGroup.of_processes(timeout, process_group))
    return _savers[key]


def _folder(checkpoint_id: str | os.PathLike[str] | None) -> tuple[Path, str | None]:
    """The path, and the address if it is one: then the path is in the cache."""
    if not checkpoint_id:
        raise UsageError(f"checkpoint_id: {checkpoint_id!r} is not a folder; give the path of the checkpoint's")
    if (address := address_of(os.fspath(checkpoint_id))) is not None:
        return working_folder(address), Bucket(address).url
    return resolve_link(Path(checkpoint_id).absolute()), None


def _check_refused(arguments: Mapping[str, Any]) -> None:
    """Raises UsageError for arguments of DCP's that ask for something else than what is done here."""
    for name, value in arguments.items():
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        default_planner = kind in _DEFAULT_PLANNERS and value.flatten_state_dict
        if not default_planner and (name not in _OTHERS or str(value) not in _NEUTRAL):
            instead = "give the folder as checkpoint_id" if name in _STORAGE else "leave it out"
            raise UsageError(f"{name}={value!r} is not supported here; {instead}, or use torch.distributed.checkpoint")


def _check_replaceable(path: Path) -> None:
    """Raises UsageError where something would be lost that is not part of a checkpoint."""
    if os.path.lexists(path) and not path.is_dir():
        raise UsageError(f"checkpoint_id: {path} is a file; choose another name")
    known = {entry.name for entry in read_manifest(path).files} if (path / MANIFEST).exists() else set()
    for name in files.regular_files(path) if path.is_dir() else ():
        if name not in known and name not in (MANIFEST, _METADATA) and not name.endswith(".distcp"):
            raise UsageError(f"checkpoint_id: {path} has {name}, which would be lost; move it or name another folder")


def _save_to_load(path: Path) -> str | None:
    """The name of the save that is there; None where its manifest is corrupted. Raises where there is none of ours."""
    if (path / _METADATA).exists() and not (path / MANIFEST).exists():
        raise CheckpointMismatch(f"{path} is one of torch's: load it there, or run `stepmark import {path} OUT` first")
    if not (path / MANIFEST).exists():
        raise CheckpointNotFound(f"{path} is no checkpoint: it has no {MANIFEST}")
    return save_of(path)


def __getattr__(name: str) -> Any:
    why = f"stepmark.checkpoint.dcp has no {name!r}, only save, async_save and load; for others, import torch's"
    raise AttributeError(why)
