"""What a failed read says about a checkpoint: that it is damaged, or nothing at all."""

from __future__ import annotations

import errno
from pathlib import Path

from stepmark.errors import CheckpointDamaged, CheckpointError


class FileIncomplete(CheckpointDamaged):
    """A file is missing, or has another size than it was written with: any rank can see that at once."""


def cannot_read(path: Path, error: OSError, what: str = "it") -> CheckpointError:
    """The error to raise where reading `path` has failed; `what` of it was to be read.

    FileIncomplete where there is no such file, CheckpointDamaged where the disk cannot read it, and else, as for a
    server that does not answer, missing rights or too many open files, a plain CheckpointError: nobody may take the
    checkpoint for damaged because of it.
    """
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return FileIncomplete(f"{path} is missing")
    reason = error.strerror or str(error)
    if error.errno == errno.EIO:
        return CheckpointDamaged(f"{path}: {what} cannot be read: {reason}")
    return CheckpointError(
        f"{path}: {what} cannot be read: {reason}; this does not mean that the checkpoint is damaged, and nothing was "
        "changed in it: see to the cause, and try again"
    )
