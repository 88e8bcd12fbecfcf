"""Descriptors of files that are open for writing, which a forked process must not keep open.

A data worker that is forked during a save inherits its descriptors, and the space of a deleted file stays allocated
while any process has it open. In the forked process they are redirected to /dev/null at once. Their numbers stay in
use, so that objects that hold them do not close another file. The parent's locks end with the parent.
"""

from __future__ import annotations

import os

_open: set[int] = set()


def opened(descriptor: int) -> int:
    """Notes an open descriptor; returns it."""
    _open.add(descriptor)
    return descriptor


def closing(descriptor: int) -> None:
    """Call it just before a descriptor is closed."""
    _open.discard(descriptor)


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
