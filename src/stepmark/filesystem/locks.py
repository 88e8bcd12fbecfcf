"""File locks, by which one process of a machine finds out that another one has ended."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct


def try_lock(descriptor: int) -> bool | None:
    """Whether the file, open for writing, could be locked; None where the file system does not support locks.

    The lock belongs to the open file, not to the process: a lock of the process would be lost as soon as anything in
    it, such as a callback that uploads the folder, reads the file and closes it.
    """
    try:
        _set_lock(descriptor, fcntl.F_WRLCK)
    except OSError as error:
        return False if error.errno in (errno.EACCES, errno.EAGAIN) else None
    return True


def unlock(descriptor: int) -> None:
    """Releases the lock, if there is one."""
    with contextlib.suppress(OSError):
        _set_lock(descriptor, fcntl.F_UNLCK)


def _set_lock(descriptor: int, kind: int) -> None:
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi", kind, os.SEEK_SET, 0, 0, 0))
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel that has no such locks
            raise
        fcntl.lockf(descriptor, fcntl.LOCK_UN if kind == fcntl.F_UNLCK else fcntl.LOCK_EX | fcntl.LOCK_NB)
