"""What another thread is executing."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from pathlib import Path
from types import FrameType

from stepmark.liveness.collection import without_collection

_PACKAGE = Path(__file__).parents[1]
_COMPILERS = ("_compile", "compile_fx_inner")  # of torch._dynamo and torch._inductor, while they compile
_LIBRARY = sysconfig.get_path("stdlib") + os.sep


def frame_of(thread: int) -> FrameType | None:
    """The frame that the thread of this identity executes, for the calling one that of the caller; None where it has
    ended.

    Python 3.11 may collect garbage while it gathers the frames of all threads, and then holds a lock that the end of a
    `threading.local` waits for: the process would hang forever (CPython issue 106883). So no garbage is collected
    meanwhile.
    """
    with without_collection():
        frame = sys._current_frames().get(thread)
    return frame.f_back if frame is not None and thread == threading.get_ident() else frame


def is_compiling(frame: FrameType | None) -> bool:
    """Whether a thread is in a compilation of torch.compile."""
    return any(each.f_code.co_name in _COMPILERS and "/torch/_" in each.f_code.co_filename for each in outwards(frame))


def is_waiting(frame: FrameType | None) -> bool:
    """Whether a thread waits in a collective or in a wait of this package, rather than in a function of the user's."""
    first = next((each for each in outwards(frame) if not _is_library(each)), None)
    if first is None:
        return False
    file = first.f_code.co_filename
    return "/torch/distributed/" in file or Path(file).is_relative_to(_PACKAGE)


def innermost(frame: FrameType | None) -> str:
    """The innermost function of a thread that is neither torch's nor Python's own, with file and line."""
    other = (each for each in outwards(frame) if not _is_library(each) and "/torch/" not in each.f_code.co_filename)
    found = next(other, frame)
    if found is None:
        return "a thread that has ended"
    path = Path(found.f_code.co_filename)
    shown = path.relative_to(_PACKAGE) if path.is_relative_to(_PACKAGE) else path.name
    return f"{found.f_code.co_name} ({shown}, line {found.f_lineno})"


def stack(frame: FrameType | None, frames: int = 12) -> list[str]:
    """The innermost frames of a thread, the innermost last. Source files, whose file system may hang, are not read."""
    shown = [
        f'File "{each.f_code.co_filename}", line {each.f_lineno}, in {each.f_code.co_name}' for each in outwards(frame)
    ]
    return shown[:frames][::-1]


def outwards(frame: FrameType | None) -> list[FrameType]:
    """The frame and those that called it.

    Reading `f_back` makes an object for the caller's frame. In Python 3.11 that may collect garbage, and so let the
    frame's own thread return from it first: what is read then is freed memory. So no garbage is collected meanwhile.
    """
    found = []
    with without_collection():
        while frame is not None:
            found.append(frame)
            frame = frame.f_back
    return found


def _is_library(frame: FrameType) -> bool:
    """Whether a function is of Python's own library, or of what calls torch's operators."""
    file = frame.f_code.co_filename
    return (file.startswith((_LIBRARY, "<frozen")) and "site-packages" not in file) or file.endswith("/torch/_ops.py")
