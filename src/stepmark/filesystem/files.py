"""All calls that change the file system: one place to count them and to inject faults.

Callers handle OSErrors. Each system call that changes something is one of this module's `os` or `_renameat2`,
which the fault tests replace.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import xxhash

from stepmark.errors import FileRefused

LARGEST = 128 << 20  # bytes of a file that is read as a whole, but for those with these endings
_LARGEST = {"used_recipe.yaml": 1 << 20, ".jsonl": 8 << 30, ".metadata": 512 << 20, "trainer_state.json": 8 << 30}
_WHOLE = (".json", ".txt", ".model", ".jinja", ".py")  # of files that libraries read as a whole
_NO_FILE = "is a link that is not followed, or no regular file"
TEMPORARY = ".stepmark-"  # begins the names of files that are being made; 32 hexadecimal digits follow
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
PATIENCE = 60.0  # seconds that a mount may remember a missing name
SOON = 5.0  # seconds in which a mount that ranks share shows a new name, where it is known that they may share none
_POLL = 0.1

Result = TypeVar("Result")

# Descriptors of files that are open for writing. A data worker that is forked during a save inherits them, and the
# space of a deleted file stays allocated while any process has it open. So in the forked process they are redirected
# to /dev/null at once. Their numbers stay in use, so that objects that hold them do not close another file. The
# parent's locks end with the parent.
_open: set[int] = set()


def _opened(descriptor: int) -> int:
    _open.add(descriptor)
    return descriptor


def _let_go() -> None:
    if not _open:
        return
    try:
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # no descriptor is left: the files stay open as long as this process lives
        return
    for descriptor in _open:
        os.dup2(nowhere, descriptor, inheritable=False)
    os.close(nowhere)
    _open.clear()


os.register_at_fork(after_in_child=_let_go)


def when_visible(call: Callable[[], Result], path: Path, patience: float = PATIENCE) -> Result:
    """The result of a call that opens the file. While the call finds no file and the folder lists it, it is tried
    again: network file systems and FUSE may remember that a name was missing, when another machine has created the file
    since. Raises FileNotFoundError where it is not listed, or after `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return call()
        except FileNotFoundError:
            if time.monotonic() > deadline or not _is_listed(path):
                raise
        time.sleep(_POLL)


def _is_listed(path: Path) -> bool:
    """Whether the folder lists the name, whatever looking at the file itself says."""
    try:
        return path.name in os.listdir(path.parent)
    except OSError:
        return False


def appears(path: Path, patience: float | None = None) -> bool:
    """Whether what another machine has made is there within `patience` seconds; default: PATIENCE."""
    deadline = time.monotonic() + (PATIENCE if patience is None else patience)
    while not os.path.exists(path):  # Path.exists raises where it may not look
        if time.monotonic() > deadline:
            return False
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # makes a network file system refresh its view
        time.sleep(0.2)
    return True


def make_folder(path: Path, *, parents: bool = True) -> None:
    """Creates a folder and its parents, unless it exists."""
    try:
        os.mkdir(path)
    except FileNotFoundError:
        if path.parent == path or not parents:
            raise
        make_folder(path.parent)
        make_folder(path, parents=False)  # in /proc there is never one
    except FileExistsError:
        # Of a link, the name is visible: what it names is there or not.
        if not when_visible(lambda: stat.S_ISDIR(os.stat(path).st_mode), path, 0.0 if path.is_symlink() else PATIENCE):
            raise
    except OSError:
        if not path.is_dir():
            raise


def make_own_folder(path: Path) -> None:
    """The same of a folder of ours inside a run's. Raises FileRefused where a link or a file has its name."""
    make_folder(path.parent)
    if not os.path.lexists(path):
        make_folder(path)
    if not stat.S_ISDIR(when_visible(lambda: os.lstat(path).st_mode, path)):
        raise FileRefused(errno.ENOTDIR, "is a link or a file, and has to be a folder", str(path))


def make_durable_folder(path: Path) -> None:
    """Creates a folder and its parents, which also survive a crash of the machine."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    make_folder(path)
    for folder in reversed(missing):
        sync_folder(folder.parent)


def open_for_writing(path: Path, *, truncate: bool = False, exclusive: bool = False) -> int:
    """A descriptor of the file, which is created if it does not exist. A link is not followed."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    flags |= (os.O_TRUNC if truncate else 0) | (os.O_EXCL if exclusive else 0)
    return _opened(os.open(path, flags, 0o666))


def open_for_appending(path: Path) -> BinaryIO:
    """The file, for writes to its end; one that has another name too becomes a copy. Raises FileRefused for a link."""
    if regular_file_size(path) is None and os.path.lexists(path):
        raise FileRefused(errno.ELOOP, _NO_FILE, str(path))
    if os.path.exists(path) and os.stat(path).st_nlink > 1:
        replace_file(path, read_file(path))
    return open(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666), "a+b")


def open_for_reading(path: Path, *, follow: bool = False) -> BinaryIO:
    """A regular file; with `follow` also a link inside its folder. Raises FileRefused for anything else, and for a file
    larger than one of its name can be."""
    status = os.stat(path, follow_symlinks=follow)
    if not stat.S_ISREG(status.st_mode) or (follow and leads_out(path.parent, path)):
        raise FileRefused(errno.ELOOP, _NO_FILE, str(path))
    most = next((size for ending, size in _LARGEST.items() if path.name.endswith(ending)), LARGEST)
    if status.st_size > most:
        raise FileRefused(errno.EFBIG, f"has {status.st_size} bytes, more than the {most} of such a file", str(path))
    return open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)), "rb")


def read_file(path: Path, *, follow: bool = False) -> bytes:
    """The content of a small file. Raises as `open_for_reading` does."""
    with open_for_reading(path, follow=follow) as file:
        return file.read()


def file_checksum(path: Path) -> tuple[int, str]:
    """Size in bytes and xxh3-128, in hexadecimal digits, of a file."""
    with path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
        return file.tell(), digest


def files_in(folder: Path, pattern: str) -> list[Path]:
    """The files of a folder of ours with such names; none in a link."""
    return [] if folder.is_symlink() else sorted(folder.glob(pattern))


def check_files(folder: Path) -> None:
    """Raises FileRefused where a library that reads the folder's files would wait, fill the memory or be led out."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.suffix in _WHOLE:
            open_for_reading(path, follow=True).close()
        elif leads_out(folder, path) or (path.exists() and not (path.is_file() or path.is_dir())):
            raise FileRefused(errno.ELOOP, _NO_FILE, str(path))


def leads_out(folder: Path, path: Path) -> bool:
    """Whether a path leads out of the folder. In the hub's cache the files of a snapshot are links to `blobs`."""
    root, target = folder.resolve(), path.resolve()
    blobs = [parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots"]
    return not any(target.is_relative_to(allowed) for allowed in (root, *blobs))


def open_past_cache(path: Path) -> int | None:
    """A descriptor for direct writes of full pages from page-aligned memory, past the page cache. None where the file
    system does not support that. It takes a tenth of the processor time, and leaves the cache to the program."""
    try:
        return _opened(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT))
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOTSUP):
            return None
        raise


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Writes all of `data` at `offset`, in as many calls as it takes."""
    while data:
        with _naming(descriptor):
            written = os.pwrite(descriptor, data, offset)
        if written == 0:
            raise OSError(errno.EIO, "a write of 0 bytes")
        data, offset = data[written:], offset + written


def sync(descriptor: int) -> None:
    """Returns when the file's bytes and size are on the disk."""
    with _naming(descriptor):
        os.fsync(descriptor)


@contextlib.contextmanager
def _naming(descriptor: int) -> Iterator[None]:
    """Adds the file's name to an error of a call that has only its descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            with contextlib.suppress(OSError):
                error.filename = os.readlink(f"/proc/self/fd/{descriptor}")
        raise


def close(descriptor: int) -> None:
    """Closes the descriptor; some network file systems report a failed write only here."""
    _open.discard(descriptor)
    os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Returns when the folder's entries are on the disk, where the file system supports that: some, of FUSE or of
    virtual machines, cannot sync folders."""
    descriptor = when_visible(lambda: os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), path)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Returns when a file that other code wrote, and that may be read-only, is on the disk."""
    descriptor = when_visible(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC), path)
    try:
        sync(descriptor)
    finally:
        close(descriptor)


def write_file(path: Path, data: bytes | Iterable[Any], *, durable: bool = True) -> None:
    """Makes a file, small or in pieces. Not atomically: use `replace_file` where it exists, or others may read it."""
    pieces: Iterable[Any] = [data] if isinstance(data, bytes) else data
    descriptor, offset = open_for_writing(path, exclusive=True), 0
    try:
        for piece in pieces:
            view = memoryview(piece).cast("B")
            write_at(descriptor, view, offset)
            offset += len(view)
        if durable:
            sync(descriptor)
    finally:
        close(descriptor)


def replace_file(path: Path, data: bytes | Iterable[Any], *, durable: bool = False) -> None:
    """Replaces the contents of a file atomically; synced to disk before only if `durable`."""
    temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(16)}")
    try:
        write_file(temporary, data, durable=durable)
        rename(temporary, path)
    except BaseException:
        remove_file(temporary)
        raise


def overwrite_file(path: Path, data: bytes) -> None:
    """Writes a small file in place, where there is no room for another one. A reader may find half of it."""
    descriptor = _opened(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))
    try:
        write_at(descriptor, memoryview(data), 0)
        os.ftruncate(descriptor, len(data))
    finally:
        close(descriptor)


def set_permissions(path: Path, permissions: int) -> None:
    """Sets a file's permission bits, unless it has them: some file systems do not support others."""
    if os.stat(path).st_mode & 0o777 != permissions:
        os.chmod(path, permissions)


def usual_permissions(folder: Path) -> int:
    """The permission bits of a new file in the folder, as the umask and the folder's rules give them."""
    path = folder / f".permissions-{secrets.token_hex(6)}"
    descriptor = open_for_writing(path, exclusive=True)
    try:
        return os.fstat(descriptor).st_mode & 0o777
    finally:
        close(descriptor)
        remove_file(path)


def rename(source: Path, target: Path) -> None:
    """Gives a file or folder another name; replaces a file, or an empty folder, that has it."""
    os.rename(source, target)


def exchange(one: Path, other: Path) -> bool:
    """Exchanges two names atomically. False where the system or the file system does not support that."""
    code = _renameat2(one, other)
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    if code:
        raise OSError(code, os.strerror(code), str(one))
    return True


def _renameat2(one: Path, other: Path) -> int:
    """0, or the number of the error; Python has no such call."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return errno.ENOSYS
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return 0
    return ctypes.get_errno()


def remove_file(path: Path) -> None:
    """Removes a file, unless it is gone: another rank may have removed it."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_tree(path: Path) -> None:
    """Removes a folder with its contents, or a file, unless it is gone. Does not follow links."""
    if path.is_symlink() or path.is_file():
        remove_file(path)
        return
    try:
        with os.scandir(path) as entries:
            children = [(Path(entry.path), entry.is_dir(follow_symlinks=False)) for entry in entries]
    except FileNotFoundError:
        return
    for child, is_folder in children:
        if is_folder:
            remove_tree(child)
        else:
            remove_file(child)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(path)


def regular_files(folder: Path, prefix: str = "") -> Iterator[str]:
    """The relative names of all entries in the folder and its subfolders that are not folders, in order."""
    with os.scandir(folder) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        if entry.is_dir(follow_symlinks=False):
            yield from regular_files(folder / entry.name, f"{prefix}{entry.name}/")
        else:
            yield prefix + entry.name


def regular_file_size(path: Path) -> int | None:
    """A file's size in bytes; None where there is no file, or where it is not a regular one."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None
