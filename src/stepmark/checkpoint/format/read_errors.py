"""Whether a failed read means that a checkpoint is corrupted."""

from __future__ import annotations

import contextlib
import errno
import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from stepmark.errors import CheckpointDamaged, CheckpointError, FileRefused
from stepmark.filesystem.error_advice import explained, first_line


class FileIncomplete(CheckpointDamaged):
    """A file is missing or has the wrong size, which every rank can see."""


def cannot_read(path: Path, error: OSError, what: str = "it") -> CheckpointError:
    """The error to raise where reading `path` has failed; `what` of it was to be read.

    FileIncomplete where there is no such file, CheckpointDamaged where the disk cannot read it or no save can have
    written it, and else, as for a server that does not answer, missing rights or too many open files, a plain
    CheckpointError: the checkpoint may be intact.
    """
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return FileIncomplete(f"{path} is missing")
    reason = error.strerror or str(error)
    if error.errno == errno.EIO or isinstance(error, FileRefused):
        return CheckpointDamaged(f"{path}: {what} cannot be read: {reason}")
    return CheckpointError(
        f"{path}: {what} cannot be read: {reason}; the checkpoint may be intact, and nothing in it was "
        "changed: fix the cause and try again"
    )


def well_formed(what: str) -> AbstractContextManager[None]:
    """Inside the block, values that are not such as a file holds raise CheckpointDamaged, which begins with `what`."""
    kinds = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, struct.error)
    return explained(lambda error: CheckpointDamaged(f"{what} malformed: {first_line(error)[:200]}"), kinds)


@contextlib.contextmanager
def read_errors_of(path: Path) -> Iterator[None]:
    """Inside the block, an OSError of reading `path` is raised as what `cannot_read` makes of it."""
    try:
        yield
    except OSError as error:
        raise cannot_read(path, error) from error
