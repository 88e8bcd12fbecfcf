"""`stepmark.save` and `stepmark.load`: torch.save and torch.load that are safe on lazy devices.

`save` waits for the device once, brings tensors to the host in groups, writes a temporary file beside the target, syncs
it and renames it. So a crash leaves the old file or the new one. Symbolic links are kept: the file they lead to is
replaced. `torch.load(weights_only=True)` reads what `save` writes. `load` verifies every checksum of the file before
torch reads it. Both have a deadline, which holds even where the disk or the device is stuck; see `watchdog`.
"""

from __future__ import annotations

import contextlib
import errno
import io
import pickle
import secrets
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.serialization import get_unsafe_globals_in_checkpoint

from stepmark.checkpoint.format.checkpoint_folders import resolve_link
from stepmark.checkpoint.format.read_errors import cannot_read
from stepmark.checkpoint.host_memory import GROUP_BYTES
from stepmark.checkpoint.places import explained, file_blocks
from stepmark.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, StepmarkError, UsageError
from stepmark.filesystem import error_advice, files
from stepmark.filesystem.cache_folder import cache_root
from stepmark.filesystem.local_paths import address_of
from stepmark.filesystem.objects import Bucket
from stepmark.filesystem.sizes import in_groups
from stepmark.liveness.failure_report import describe_error
from stepmark.liveness.watchdog import Deadline, exit_unless_handled
from stepmark.runtime.base import Runtime
from stepmark.runtime.device import runtime_for
from stepmark.runtime.xla_environment import extracting_graphs, warn_not_saved
from stepmark.sharding.views import flat_bytes

_DIRECTORY = 0x10  # the bit of a record's external attributes by which readers of archives know a folder


def save(state: Any, path: str | Path, *, write: bool = True, timeout: float = 1800.0) -> None:
    """Saves nested dicts, lists and tuples of tensors and plain values to one file, atomically.

    Live tensors are neither moved nor replaced. On a lazy device every rank must call it, because the pending graph may
    contain collectives. A process that only extracts graphs (`NEURON_EXTRACT_GRAPHS_ONLY`) writes nothing.

    Args:
        state: Nested dicts, lists and tuples. Tensors may have any dtype and shape and be on any device.
        path: The file to create or replace, or its address (`s3://…`). Of a link, what it leads to is replaced.
        write: Whether this rank writes the file. Ranks with False only run what is pending on the device.
        timeout: Deadline in seconds for each of two phases: copying to the host, which includes waiting for the
            device, and writing. The process is ended where it cannot stop by itself.

    Raises:
        UsageError: `state` holds something that `torch.load(weights_only=True)` would refuse, or `path` is a folder, a
            pipe or a device.
        CheckpointError: The file could not be written. An existing file is unchanged.
        CheckpointTimeout: A phase ended, but after its deadline.
    """
    path = _path(path, "save")
    if (address := address_of(path)) is not None:
        with _in_cache(address) as (bucket, local):
            save(state, local, write=write, timeout=timeout)
            if local.exists():
                bucket.put(local.name, file_blocks(local))
        return
    with _deadline(path, "copying to the host", timeout), _refused(path):
        on_host = _to_host(state, copy=write)
    if write and extracting_graphs():
        warn_not_saved(str(path))
    elif write:
        with _deadline(path, "writing", timeout), _refused(path):
            _write(on_host, path)


def load(
    path: str | Path,
    map_location: Any = None,
    *,
    weights_only: bool = True,
    mmap: bool | None = None,
    timeout: float = 1800.0,
) -> Any:
    """Loads what `stepmark.save` or torch.save has saved, without executing code from the file.

    Args:
        path: The file, or its address.
        map_location: The device for all tensors; or a dict or function, as torch.load takes it. None: the device they
            were saved from, and the host for tensors of lazy devices.
        weights_only: True: nothing else is ever loaded.
        mmap: As of torch.load, whether tensors stay in the file, which is verified all the same.
        timeout: Deadline in seconds. The process is ended where it cannot stop by itself.

    Returns:
        The saved state. Tensors have their saved shapes and dtypes; those that shared memory still do.

    Raises:
        CheckpointNotFound: The file does not exist.
        CheckpointDamaged: Bytes are missing or differ from their checksum. torch can be configured to write
            none; such a file is only checked for completeness.
        CheckpointError: The file cannot be read at the moment, or holds more than tensors and plain values.
        CheckpointTimeout: Reading ended, but after the deadline.
    """
    path = _path(path, "load")
    if (address := address_of(path)) is not None:
        with _in_cache(address) as (bucket, local):
            if (found := bucket.stat(local.name)) is not None:
                files.write_file(local, bucket.blocks(local.name, found.size), durable=False)
                return load(local, map_location, weights_only=weights_only, mmap=mmap, timeout=timeout)
        raise CheckpointNotFound(f"file not found: {address}")
    if not weights_only:
        raise UsageError("weights_only: files that stepmark.load reads run no code; leave it out, or use torch.load")
    if not path.is_file():
        raise CheckpointNotFound(f"file not found: {path}")
    given = callable(map_location) or isinstance(map_location, Mapping)
    device = None if map_location is None or given else torch.device(map_location)
    with _deadline(path, "reading", timeout):
        checked = _check(path)
        lazy = device is not None and device.type == "xla"
        try:
            where = map_location if given else "cpu" if lazy else device or _known_device
            state = torch.load(path, map_location=where, mmap=mmap, weights_only=True)
        except OSError as error:
            raise _unreadable(path, error) from error
        except Exception as error:  # torch and pickle raise many types
            kind = CheckpointError if _is_intact(error, checked) else CheckpointDamaged
            raise kind(f"{path} cannot be read: {describe_error(error)}") from error
        if device is None or not lazy:
            return state
        runtime = runtime_for(device)
        return _map_tensors(state, lambda tensors: _placed(tensors, runtime))


def _path(path: Any, function: str) -> Path:
    if hasattr(path, "read") or hasattr(path, "write"):
        raise UsageError(
            f"path: stepmark.{function} takes the path of a file; for a {type(path).__name__} use torch.{function}"
        )
    return Path(path)


@contextlib.contextmanager
def _in_cache(address: str) -> Iterator[tuple[Bucket, Path]]:
    """Where the object at an address is, and a path for it in the cache, which errors of the block do not name. Raises
    CheckpointError for an OSError."""
    place, _, name = address.rpartition("/")
    if place.count("/") < 2:
        raise UsageError(f"path: {address} names no file in a bucket")
    bucket = Bucket(place)
    files.make_folder(cache_root())
    with tempfile.TemporaryDirectory(dir=cache_root()) as folder, explained(address):
        try:
            yield bucket, Path(folder) / name
        except StepmarkError as error:
            error.args = (str(error).replace(f"{folder}/{name}", address),)
            raise


def _known_device(storage: Any, location: str) -> Any:
    """Keeps a storage of a lazy device on the host, and returns any other to its device."""
    return storage if location.startswith("xla") else None


@contextlib.contextmanager
def _deadline(path: Path, doing: str, timeout: float) -> Iterator[None]:
    ended = threading.Event()
    what = f"{path}: rank {_rank()} ({doing}) has not ended this"
    deadline = Deadline(what, timeout, lambda error: exit_unless_handled(ended, error, _rank()), "timeout")
    try:
        yield
    finally:
        ended.set()
        deadline.release()
    deadline.end()


def _rank() -> int:
    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if initialized else 0


def _to_host(state: Any, *, copy: bool) -> Any:
    """The same nested state with host copies of all tensors that are on a device; shared tensors stay shared. Without
    `copy`, only runs what is pending on the device."""

    def to_host(tensors: list[Tensor]) -> list[Tensor]:
        if any(tensor.is_meta for tensor in tensors):
            raise UsageError("the state has a tensor on the meta device, which has no values; materialize it first")
        device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
        if device is None:
            return tensors
        runtime = runtime_for(device)
        runtime.step_boundary(wait=True)
        if not copy:
            return tensors
        on_device = [tensor for tensor in tensors if tensor.device.type != "cpu"]
        copies: dict[int, Tensor] = {}
        for group in in_groups(on_device, [tensor.nbytes for tensor in on_device], GROUP_BYTES):
            copies.update(zip(map(id, group), runtime.to_host(group), strict=True))
        _tie(on_device, copies)
        return [_like(tensor, copies[id(tensor)]) if id(tensor) in copies else tensor for tensor in tensors]

    return _map_tensors(state, to_host)


def _tie(tensors: list[Tensor], copies: dict[int, Tensor]) -> None:
    """Lets tensors that share device memory share one copy: it is written once, and they are tied again when loaded."""
    found: dict[tuple[Any, ...], Tensor] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage() if tensor.layout == torch.strided else None
        if storage is None or not 0 < tensor.nbytes == storage.nbytes():
            continue  # a view of part of a storage: a lazy device does not report which part
        copy = copies[id(tensor)]
        same = found.setdefault((storage._cdata, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())), copy)
        if flat_bytes(same).equal(flat_bytes(copy)):  # not where one is a transposed view
            copies[id(tensor)] = same.detach()


def _placed(tensors: list[Tensor], runtime: Runtime) -> list[Tensor]:
    """The tensors on the runtime's device; tied tensors stay tied."""
    placed: dict[tuple[Any, ...], Tensor] = {}
    for tensor in tensors:
        key = _memory_of(tensor)
        if key not in placed:
            placed[key] = runtime.place(tensor.detach())
    return [_like(tensor, placed[_memory_of(tensor)].detach()) for tensor in tensors]


def _memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """A key that is equal for tensors that are the same view of the same host memory."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or not tensor.nbytes:
        return (id(tensor),)
    signs = tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), *signs


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(value, requires_grad=tensor.requires_grad)
    return value.requires_grad_(tensor.requires_grad)


def _map_tensors(state: Any, function: Callable[[list[Tensor]], list[Tensor]]) -> Any:
    """The nested state with other tensors; `function` gets each tensor once.

    The state is pickled around its tensors, so whatever torch.save keeps is kept: classes of dicts, their attributes
    (such as a state dict's `_metadata`), and lists that are shared.
    """
    found: dict[int, Tensor] = {}

    class Collecting(pickle.Pickler):
        def persistent_id(self, value: Any) -> int | None:
            return id(found.setdefault(id(value), value)) if isinstance(value, Tensor) else None

    class Replacing(pickle.Unpickler):
        def persistent_load(self, key: int) -> Tensor:
            return replaced[key]

    Collecting(pickled := io.BytesIO()).dump(state)
    replaced = dict(zip(found, function(list(found.values())), strict=True))
    return Replacing(io.BytesIO(pickled.getbuffer())).load()


def _refused(path: Path) -> AbstractContextManager[None]:
    """Turns what pickle raises for a state into a UsageError."""
    kinds = (AttributeError, TypeError, ValueError, pickle.PicklingError)
    return error_advice.explained(lambda error: UsageError(f"{path}: the state cannot be saved: {error}"), kinds)


def _write(state: Any, path: Path) -> None:
    kinds = (OSError, RuntimeError)  # torch's writer raises RuntimeError for some errors of the file system
    with error_advice.explained(lambda error: CheckpointError(f"{path} was not saved: {describe_error(error)}"), kinds):
        if path.is_dir():
            raise UsageError(f"{path} is a folder; give the path of a file in it")
        if path.exists() and not path.is_file():  # which the rename would replace
            raise UsageError(f"{path} is not a regular file, and would be replaced; use torch.save to write to it")
        target = resolve_link(path)
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
        try:
            torch.save(state, temporary)
            if refused := get_unsafe_globals_in_checkpoint(temporary):
                raise UsageError(
                    f"{path}: torch.load(weights_only=True) would refuse {', '.join(sorted(refused))}; save tensors "
                    "and plain values, such as a module's state_dict()"
                )
            files.sync_file(temporary)
            files.rename(temporary, target)
            files.sync_folder(target.parent)
        finally:
            files.remove_file(temporary)


def _check(path: Path) -> bool:
    """Verifies the checksums that torch.save writes and torch.load ignores. Returns whether every record had one."""
    try:
        if not zipfile.is_zipfile(path):
            return False  # torch's format before 1.6, which has none; torch.load names any other problem
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            for record in records:
                if record.compress_type != zipfile.ZIP_STORED:
                    raise zipfile.BadZipFile(f"{record.filename} is compressed, which torch never writes")
                if record.external_attr & _DIRECTORY and not record.is_dir():
                    raise zipfile.BadZipFile(f"{record.filename} is marked as a folder, which torch would not read")
                if record.CRC:  # 0: torch was configured to write no checksum, or to leave the data out
                    with archive.open(record) as file:
                        while file.read(1 << 20):  # which raises BadZipFile at the end, where the checksum is another
                            pass
            return all(record.CRC or not record.file_size for record in records)
    except OSError as error:
        raise _unreadable(path, error) from error
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError) as error:
        raise CheckpointDamaged(f"{path} is corrupted: {error}") from error


def _is_intact(error: Exception, checked: bool) -> bool:
    """Whether the error does not mean corruption: too little memory, a missing device, or an intact file (`checked`)
    that holds something else than tensors and plain values."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, pickle.UnpicklingError):
        return checked
    return isinstance(error, RuntimeError) and "deserialize object on a" in str(error)


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    if error.errno == errno.EINVAL:  # the file names an impossible offset
        return CheckpointDamaged(f"{path} is corrupted: {error}")
    return cannot_read(path, error)
