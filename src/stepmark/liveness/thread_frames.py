"""What another thread is executing.

Who holds a frame of Python's keeps its local variables alive when its function returns. Tensors among them would be
results of a lazy device's next graph, which would be another one than in other steps. So no thread goes on while frames
are read. faulthandler, which touches none, reads states of threads that are still being made, and crashes.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import NamedTuple

from stepmark.liveness.gc_pause import without_collection

_PACKAGE = Path(__file__).parents[1]
_COMPILERS = ("_compile", "compile_fx_inner")  # of torch._dynamo and torch._inductor, while they compile
_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_MOST = 100  # functions of a thread
_ALONE = 0.5  # seconds for which the interpreter's lock is not asked back, many times what reading takes

_reading = threading.RLock()
_interval = sys.getswitchinterval()


class CodeLocation(NamedTuple):
    """A function that a thread is in, and at which line."""

    file: str
    line: str
    function: str


def all_stacks() -> str:
    """The stacks of all threads as text."""
    own, found = threading.get_ident(), _read()
    return "\n".join(
        f"{'Current thread' if thread == own else 'Thread'} 0x{thread:016x} (most recent call first):\n"
        + "".join(f'  File "{each.file}", line {each.line} in {each.function}\n' for each in places)
        for thread, places in found.items()
    )


def places_of(thread: int) -> list[CodeLocation]:
    """Where the thread of this identity is, the innermost function first, at most 100; the calling one is where it
    calls this. Empty where it has ended."""
    if thread == threading.get_ident():
        return _places(sys._getframe(1))
    return _read(thread).get(thread, [])


def _read(only: int | None = None) -> dict[int, list[CodeLocation]]:
    """Where threads are, all or one. Garbage would be collected with a lock that it may wait for."""
    global _interval
    with _reading, without_collection():
        _interval = sys.getswitchinterval()
        sys.setswitchinterval(_ALONE)
        try:
            time.sleep(0)  # gets the interpreter's lock anew
            found = sys._current_frames()
            return {thread: _places(found[thread]) for thread in found if only in (None, thread)}
        finally:
            found = {}
            sys.setswitchinterval(_interval)


def _forget_threads() -> None:
    """In a forked process, which has none of the other threads: one of them may have been reading."""
    global _reading
    _reading = threading.RLock()
    if sys.getswitchinterval() == _ALONE:
        sys.setswitchinterval(_interval)


os.register_at_fork(after_in_child=_forget_threads)


def _places(frame: FrameType) -> list[CodeLocation]:
    frames = islice(walk_stack(frame), _MOST)
    return [CodeLocation(each.f_code.co_filename, str(line), each.f_code.co_name) for each, line in frames]


def is_compiling(places: Sequence[CodeLocation]) -> bool:
    """Whether a thread is in a compilation of torch.compile."""
    return any(each.function in _COMPILERS and "/torch/_" in each.file for each in places)


def is_waiting(places: Sequence[CodeLocation]) -> bool:
    """Whether a thread waits in a collective or in a wait of this package, rather than in a function of the user's."""
    first = next((each for each in places if not _is_library(each)), None)
    return first is not None and ("/torch/distributed/" in first.file or Path(first.file).is_relative_to(_PACKAGE))


def innermost(places: Sequence[CodeLocation]) -> str:
    """The innermost function of a thread that is neither torch's nor Python's own, with file and line."""
    if not places:
        return "an unknown place"
    found = next((each for each in places if not _is_library(each) and "/torch/" not in each.file), places[0])
    path = Path(found.file)
    shown = path.relative_to(_PACKAGE) if path.is_relative_to(_PACKAGE) else path.name
    return f"{found.function} ({shown}, line {found.line})"


def stack(places: Sequence[CodeLocation], number: int = 12) -> list[str]:
    """The innermost functions of a thread, the innermost last. Reads no source files, whose file system may hang."""
    return [f'File "{each.file}", line {each.line}, in {each.function}' for each in places[:number]][::-1]


def _is_library(place: CodeLocation) -> bool:
    """Whether a function is of Python's own library, or of what calls torch's operators."""
    own = place.file.startswith((_LIBRARY, "<frozen")) and "site-packages" not in place.file
    return own or place.file.endswith("/torch/_ops.py")
