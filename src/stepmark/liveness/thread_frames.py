"""What another thread is executing.

Who holds a frame of Python's keeps its local variables alive when its function returns. Tensors among them would be
results of a lazy device's next graph, which would be another one than in other steps. So frames are never touched:
faulthandler writes them as text, in one go.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sysconfig
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_PACKAGE = Path(__file__).parents[1]
_COMPILERS = ("_compile", "compile_fx_inner")  # of torch._dynamo and torch._inductor, while they compile
_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+).*:\n((?:  .*\n?)*)")
_PLACE = re.compile(r'  File "(.*)", line (\d+|\?+) in (.*)')


class CodeLocation(NamedTuple):
    """A function that a thread is in, and at which line."""

    file: str
    line: str
    function: str


def all_stacks(*, others: bool = True) -> str:
    """The stacks of this thread and of up to 99 `others` as text; empty where the system gives no file. Not through a
    pipe: faulthandler holds the interpreter's lock while it is full."""
    memory = hasattr(os, "memfd_create")  # a file system may hang
    try:
        with open(os.memfd_create("stacks"), "r+b") if memory else tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=others)
            file.seek(0)
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def places_of(thread: int) -> list[CodeLocation]:
    """Where the thread of this identity is, the innermost function first, at most 100; the calling one is where it
    calls this. Empty where it has ended, or where the system gives no file."""
    if thread == threading.get_ident():  # by itself: of more than 100 threads faulthandler leaves out the first ones
        return _places(all_stacks(others=False))[2:]  # without all_stacks and this function
    stacks = [_places(each[2]) for each in _THREAD.finditer(all_stacks()) if int(each[1], 16) == thread]
    return max(stacks, key=len, default=[])  # an extension may have a second one of the thread, without frames


def _places(text: str) -> list[CodeLocation]:
    return [CodeLocation(*found) for found in _PLACE.findall(text)]


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
    other = (each for each in places if not _is_library(each) and "/torch/" not in each.file)
    found = next(other, places[0])
    path = Path(found.file)
    shown = path.relative_to(_PACKAGE) if path.is_relative_to(_PACKAGE) else path.name
    return f"{found.function} ({shown}, line {found.line})"


def stack(places: Sequence[CodeLocation], number: int = 12) -> list[str]:
    """The innermost functions of a thread, the innermost last. Source files, whose file system may hang, are not
    read."""
    return [f'File "{each.file}", line {each.line}, in {each.function}' for each in places[:number]][::-1]


def _is_library(place: CodeLocation) -> bool:
    """Whether a function is of Python's own library, or of what calls torch's operators."""
    own = place.file.startswith((_LIBRARY, "<frozen")) and "site-packages" not in place.file
    return own or place.file.endswith("/torch/_ops.py")
