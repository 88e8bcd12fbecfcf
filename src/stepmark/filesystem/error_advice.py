"""What to do about an error of the file system."""

from __future__ import annotations

import errno
import os

_ADVICE = {
    errno.ENOSPC: "free some space there, or use another folder",
    errno.EDQUOT: "the quota is used up: free some space there, or use another folder",
    errno.ESTALE: "the file server has restarted, or the file was replaced there; check the mount, then start again",
    errno.EROFS: "the file system is read-only; use another folder, or mount it for writing",
    errno.EIO: "the disk or the file server has failed; check it, or use another folder",
}


def with_advice(message: str, error: BaseException) -> str:
    """The message, and what to do if the error is one of the file system for which that is known and the message does
    not say so yet. Libraries that are written in other languages have errors of their own, with the system's words."""
    if isinstance(error, OSError):
        advice = _ADVICE.get(error.errno or 0)
    else:
        advice = next((words for number, words in _ADVICE.items() if os.strerror(number) in str(error)), None)
    return message if advice is None or advice in message else f"{message}; {advice}"
