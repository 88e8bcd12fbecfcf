"""`stepmark.save` and `stepmark.load`: torch.save and torch.load that are safe on lazy devices.

`save` waits for the device once, brings tensors to the host in groups, writes to a temporary file, syncs it, and
renames it; so it is the old or the new one. What a killed one has left, the next save to the same path removes. A link
stays, and the file that it leads to is replaced. What `save` writes, `torch.load(weights_only=True)` reads. `load`
checks every byte first. Both have a deadline; see `watchdog`.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import glob
import os
import pickle
import secrets
import stat
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.serialization import get_unsafe_globals_in_checkpoint

from stepmark.checkpoint.coordination.heartbeat import boot_id
from stepmark.checkpoint.coordination.messages import describe_error, late
from stepmark.checkpoint.coordination.watchdog import end_unless, watchdog
from stepmark.checkpoint.format.directory import resolve_link
from stepmark.checkpoint.format.read_errors import cannot_read
from stepmark.checkpoint.host_memory import GROUP_BYTES
from stepmark.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, CheckpointTimeout, UsageError
from stepmark.filesystem import files
from stepmark.filesystem.locks import try_lock
from stepmark.launch.process_exit import print_stacks
from stepmark.runtime.base import Runtime
from stepmark.runtime.device import runtime_for
from stepmark.runtime.xla_environment import extracting_graphs, warn_not_saved

_OWNERS = stat.S_IRUSR | stat.S_IWUSR
_DIRECTORY = 0x10  # the bit of a record's external attributes by which readers of archives know a folder


def save(state: Any, path: str | Path, *, write: bool = True, timeout: float = 1800.0) -> None:
    """Saves any nest of dicts, lists, tuples, tensors and plain values.

    On a lazy device all ranks call it, since what is pending may hold collectives; those with `write=False` write
    nothing. Live tensors are neither moved nor replaced. `timeout` is in seconds, for each of: waiting for the device,
    copying, writing. A file that is replaced leaves its permissions to the new one. Raises UsageError for what
    `torch.load(weights_only=True)` would refuse, and for a path that is there and no file, and CheckpointError where it
    cannot be written; then the file is what it was. A process that only extracts graphs (`NEURON_EXTRACT_GRAPHS_ONLY`)
    writes nothing.
    """
    path = Path(path)
    with _deadline(path, "copying to the host", timeout):
        on_host = _to_host(state, copy=write)
    if write and extracting_graphs():
        warn_not_saved(str(path))
    elif write:
        with _deadline(path, "writing", timeout):
            _write(on_host, path)


def load(path: str | Path, map_location: str | torch.device | None = None, *, timeout: float = 1800.0) -> Any:
    """What was saved, by `save` or torch.save; nothing but tensors and plain values is ever built.

    `map_location`: the device for all tensors; None: the host for those of lazy devices, else the device they were on.
    Raises CheckpointDamaged where a byte is not as it was written, as far as the file has checksums (torch can be told
    to write none), CheckpointNotFound, and CheckpointError where it cannot be read for the moment.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointNotFound(f"there is no file {path}")
    device = None if map_location is None else torch.device(map_location)
    with _deadline(path, "reading", timeout):
        checked = _check(path)
        at_once = None if device is None else "cpu" if device.type == "xla" else device
        try:
            state = torch.load(path, map_location=at_once or _known_device, weights_only=True)
        except OSError as error:
            raise _unreadable(path, error) from error
        except Exception as error:  # torch and pickle raise of every kind
            kind = CheckpointError if _is_no_damage(error, checked) else CheckpointDamaged
            raise kind(f"{path} cannot be read: {describe_error(error)}") from error
        if device is not None and device.type == "xla":
            runtime = runtime_for(device)
            return _map_tensors(state, lambda tensors: _placed(tensors, runtime))
        return state


def _known_device(storage: Any, location: str) -> Any:
    """Leaves a storage of a lazy device on the host, and sends any other where it was."""
    return storage if location.startswith("xla") else None


@contextlib.contextmanager
def _deadline(path: Path, doing: str, timeout: float) -> Iterator[None]:
    ended = threading.Event()
    errors: list[CheckpointTimeout] = []

    def expired() -> None:
        what = f"{path}: rank {_rank()} ({doing}) has not ended this"
        errors.append(CheckpointTimeout(late(what, timeout, "timeout")))
        print_stacks(str(errors[0]))
        end_unless(ended, errors[0], _rank())

    watch = watchdog.watch(time.monotonic() + timeout, expired)
    try:
        yield
    finally:
        ended.set()
        watchdog.release(watch)
    if errors:
        raise errors[0]


def _rank() -> int:
    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if initialized else 0


def _to_host(state: Any, *, copy: bool) -> Any:
    """The same nest with copies of all tensors that are on a device; tensors that are the same stay the same, and
    views bring no more of their storage than is in the nest. Without `copy` what is pending is done, and nothing else.
    """

    def to_host(tensors: list[Tensor]) -> list[Tensor]:
        device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
        if device is None:
            return _compact(tensors) if copy else tensors
        runtime = runtime_for(device)
        runtime.step_boundary(wait=True)
        if not copy:
            return tensors
        on_device = [tensor for tensor in tensors if tensor.device.type != "cpu"]
        copies = _tied(on_device, dict(_copies(on_device, runtime)))
        return [_like(tensor, copies[id(tensor)]) if id(tensor) in copies else tensor for tensor in tensors]

    return _map_tensors(state, to_host)


def _compact(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of those host tensors whose storages have more bytes than these tensors use, which torch.save would all
    write; equal views have one copy."""
    views: dict[int, dict[tuple[Any, ...], Tensor]] = {}
    for tensor in filter(_is_plain, tensors):
        views.setdefault(tensor.untyped_storage().data_ptr(), {})[_view_of(tensor)] = tensor
    copies: dict[int, dict[tuple[Any, ...], Tensor]] = {}
    for address, found in views.items():
        used = sum(tensor.nbytes for tensor in found.values())
        if used < next(iter(found.values())).untyped_storage().nbytes():
            copies[address] = {key: tensor.detach().clone() for key, tensor in found.items()}

    def compact(tensor: Tensor) -> Tensor:
        found = copies.get(tensor.untyped_storage().data_ptr()) if _is_plain(tensor) else None
        return tensor if found is None else _like(tensor, found[_view_of(tensor)].detach())

    return [compact(tensor) for tensor in tensors]


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type == "cpu" and type(tensor) in (Tensor, nn.Parameter)


def _view_of(tensor: Tensor) -> tuple[Any, ...]:
    place = tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())
    return tensor.dtype, tensor.is_conj(), tensor.is_neg(), *place


def _copies(tensors: list[Tensor], runtime: Runtime) -> Iterator[tuple[int, Tensor]]:
    group: list[Tensor] = []
    for tensor in tensors:
        if group and sum(one.nbytes for one in group) + tensor.nbytes > GROUP_BYTES:
            yield from zip(map(id, group), runtime.to_host(group), strict=True)
            group = []
        group.append(tensor)
    yield from zip(map(id, group), runtime.to_host(group), strict=True)


def _tied(tensors: list[Tensor], copies: dict[int, Tensor]) -> dict[int, Tensor]:
    """The copies, of which those of tensors that are the same memory of the device are one: they are written once, and
    are tied when they are loaded."""
    found: dict[tuple[Any, ...], Tensor] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage() if tensor.layout == torch.strided else None
        if storage is None or not 0 < tensor.nbytes == storage.nbytes():
            continue  # views of a part: a lazy device does not tell which
        copy = copies[id(tensor)]
        same = found.setdefault((storage._cdata, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())), copy)
        if _bytes(same).equal(_bytes(copy)):  # not so where one is the other transposed, which it does not tell either
            copies[id(tensor)] = same.detach()
    return copies


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _placed(tensors: list[Tensor], runtime: Runtime) -> list[Tensor]:
    """The tensors on the runtime's device; those that are tied are tied there."""
    placed: dict[tuple[Any, ...], Tensor] = {}
    for tensor in tensors:
        key = _memory_of(tensor)
        if key not in placed:
            placed[key] = runtime.place(tensor.detach())
    return [_like(tensor, placed[_memory_of(tensor)].detach()) for tensor in tensors]


def _memory_of(tensor: Tensor) -> tuple[Any, ...]:
    if not _is_plain(tensor) or not tensor.nbytes:
        return (id(tensor),)
    return tensor.untyped_storage().data_ptr(), *_view_of(tensor)


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(value, requires_grad=tensor.requires_grad)
    return value.requires_grad_(tensor.requires_grad)


def _map_tensors(state: Any, function: Callable[[list[Tensor]], list[Tensor]]) -> Any:
    """The nest with other tensors; `function` gets each tensor once."""
    found: dict[int, Tensor] = {}

    def collect(value: Any) -> None:
        if isinstance(value, Tensor):
            found[id(value)] = value
        elif isinstance(value, dict):
            for item in value.values():
                collect(item)
        elif isinstance(value, list | tuple):
            for item in value:
                collect(item)

    def replace(value: Any) -> Any:
        if isinstance(value, Tensor):
            return replaced[id(value)]
        if isinstance(value, dict):
            same = copy.copy(value)  # keeps the class, and what a state dict has besides its items
            for key, item in value.items():
                same[key] = replace(item)
            return same
        if isinstance(value, list):
            return [replace(item) for item in value]
        if isinstance(value, tuple):
            items = [replace(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value

    collect(state)
    replaced = dict(zip(found, function(list(found.values())), strict=True))
    return replace(state)


def _write(state: Any, path: Path) -> None:
    try:
        permissions = _permissions(path)
        _replace(resolve_link(path), permissions, state, path)
    except UsageError:
        raise
    except (AttributeError, TypeError, ValueError, pickle.PicklingError) as error:
        raise UsageError(f"{path}: the state cannot be saved: {error}") from error
    except (OSError, RuntimeError) as error:  # torch's writer makes RuntimeErrors of some of the file system's
        raise CheckpointError(f"{path} was not saved: {describe_error(error)}") from error


def _permissions(path: Path) -> int | None:
    """The permission bits of the file that is there, or to which the link there leads; None where there is none. Raises
    UsageError for what is no file, which a rename would take the place of."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(mode):
        raise UsageError(f"{path} is a folder; give the path of a file in it")
    if not stat.S_ISREG(mode):
        raise UsageError(
            f"{path} is no regular file, and stepmark.save replaces files as a whole; torch.save can write there"
        )
    return mode & 0o777


def _replace(target: Path, permissions: int | None, state: Any, path: Path) -> None:
    """Writes the state beside `target`, which is no link, and gives it that name; `path` is for errors."""
    here = f".{target.name}.{boot_id()[:8]}-"  # what this machine's processes write, until it is started anew
    temporary = target.with_name(f"{here}{secrets.token_hex(4)}.part")
    descriptor = None
    try:
        _remove_abandoned(target.parent, here)
        descriptor = files.open_for_writing(temporary, exclusive=True)
        try_lock(descriptor)
        if permissions is not None:
            files.set_permissions(descriptor, permissions | _OWNERS)  # nobody else reads it meanwhile either
        torch.save(state, temporary)
        refused = get_unsafe_globals_in_checkpoint(temporary)
        if refused:
            raise UsageError(
                f"{path}: torch.load(weights_only=True) would refuse {', '.join(sorted(refused))}; save tensors "
                "and plain values, such as a module's state_dict()"
            )
        files.sync_file(temporary)
        if permissions is not None:
            files.set_permissions(descriptor, permissions)
        files.rename(temporary, target)
        files.sync_folder(target.parent)
    finally:
        files.remove_file(temporary)
        if descriptor is not None:
            with contextlib.suppress(OSError):  # it was synced, or there is an error already
                files.close(descriptor)


def _remove_abandoned(folder: Path, prefix: str) -> None:
    """Removes what saves to the same path that were killed have left: files of this machine that nobody has locked.
    One that is just being made has no bytes, and perhaps no lock yet."""
    for part in folder.glob(f"{glob.escape(prefix)}*.part"):
        with contextlib.suppress(OSError):  # another process has removed it, or it is not ours to remove
            descriptor = os.open(part, os.O_RDWR | os.O_CLOEXEC)
            try:
                if os.fstat(descriptor).st_size and try_lock(descriptor):
                    files.remove_file(part)
            finally:
                os.close(descriptor)


def _check(path: Path) -> bool:
    """Checks the sums that torch.save leaves in the file, and torch.load does not look at. Returns whether all records
    had one."""
    try:
        if not zipfile.is_zipfile(path):
            return False  # torch's format before 1.6, which has none; torch.load says what it is otherwise
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            for record in records:
                if record.external_attr & _DIRECTORY and not record.is_dir():
                    raise zipfile.BadZipFile(f"{record.filename} is marked as a folder, which torch would not read")
                if record.CRC:  # torch writes 0 where it is told to compute no sum, or to leave the data out
                    _read_through(archive, record)
            return all(record.CRC or not record.file_size for record in records)
    except OSError as error:
        raise _unreadable(path, error) from error
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError) as error:
        raise CheckpointDamaged(f"{path} is damaged: {error}") from error


def _is_no_damage(error: Exception, checked: bool) -> bool:
    """Whether the error says nothing against the file: there is no memory or no such device here, or it holds something
    else than tensors and plain values, of which every byte is as it was written (`checked`)."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, pickle.UnpicklingError):
        return checked
    return isinstance(error, RuntimeError) and "deserialize object on a" in str(error)


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    if error.errno == errno.EINVAL:  # the file leads to an offset that makes no sense
        return CheckpointDamaged(f"{path} is damaged: {error}")
    return cannot_read(path, error)


def _read_through(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    """Raises BadZipFile where the record's bytes are not those of its sum."""
    with archive.open(record) as file:
        while file.read(1 << 20):
            pass
