"""What to do about an error of the file system; and errors of other code, told as one of Stepmark's."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stepmark.errors import StepmarkError

_ADVICE = {
    errno.ENOSPC: "free some space there, or use another folder",
    errno.EDQUOT: "the quota is used up: free some space there, or use another folder",
    errno.ESTALE: "the file server has restarted, or the file was replaced there; check the mount, then start again",
    errno.EROFS: "the file system is read-only; use another folder, or mount it for writing",
    errno.EIO: "the disk or the file server has failed; check it, or use another folder",
    errno.EMFILE: "raise the limit of open files (ulimit -n), or use fewer data workers",
    errno.ENFILE: "the machine has too many open files: end other processes, or raise fs.file-max",
    errno.EAGAIN: "raise the limit of processes and threads (ulimit -u), or start fewer",
}
_TMPDIR = "free some space in one of them, or set TMPDIR to a folder that has some"
_ALSO_TEMPORARY = {
    *(errno.EBUSY, errno.ENOMEM, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOTCONN, errno.ECONNRESET),
    *(errno.ECONNREFUSED, errno.ECONNABORTED, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
}


def is_trouble(error: BaseException | None) -> bool:
    """Whether the error comes from the state of a machine, disk or network, so that the same call may succeed later."""
    found = (each.errno for each in causes(error) if isinstance(each, OSError))
    return any(errno in _ADVICE or errno in _ALSO_TEMPORARY for errno in found)


def causes(error: BaseException | None) -> list[BaseException]:
    """The error and its causes, each once: `raise error from error` makes one its own cause."""
    found: list[BaseException] = []
    while error is not None and not any(error is each for each in found):
        found.append(error)
        error = error.__cause__
    return found


def with_advice(message: str, error: BaseException) -> str:
    """The message, and what to do if the error is one of the file system for which that is known and the message does
    not say so yet. Libraries that are written in other languages have errors of their own, with the system's words."""
    if isinstance(error, OSError):
        advice = _ADVICE.get(error.errno or 0, _TMPDIR if "No usable temporary" in message else None)
    else:
        advice = next((words for number, words in _ADVICE.items() if os.strerror(number) in str(error)), None)
    return message if advice is None or advice in message else f"{message}; {advice}"


def first_line(error: BaseException) -> str:
    """Of its message; its kind too, or alone, where that says more."""
    line, kind = str(error).strip().split("\n")[0], type(error).__name__
    return (f"{kind}: {line}" if isinstance(error, LookupError) else line) if line else kind


@contextmanager
def explained(
    explain: Callable[[Exception], StepmarkError], kinds: tuple[type[Exception], ...] = (Exception,)
) -> Iterator[None]:
    """Inside the block, an exception of these kinds, of a library or a user's code, is what `explain` makes of it."""
    try:
        yield
    except StepmarkError:
        raise
    except kinds as error:
        raise explain(error) from error
