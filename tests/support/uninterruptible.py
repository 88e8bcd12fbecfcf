"""A wait that no signal interrupts, as in a file system whose server does not answer, or in a driver."""

from __future__ import annotations

import ctypes
import signal

_CLONE_VFORK = 0x4000
_STACK = 1 << 16


def wait_uninterruptibly(seconds: int) -> None:
    """Waits in the kernel, in state D, as the parent of a process of vfork does until that ends. The child only
    sleeps, and runs no Python."""
    libc = ctypes.CDLL(None)
    stack = ctypes.create_string_buffer(_STACK)
    top = ctypes.c_void_p((ctypes.addressof(stack) + _STACK) & ~15)
    sleep = ctypes.cast(libc.sleep, ctypes.c_void_p)
    assert libc.clone(sleep, top, _CLONE_VFORK | signal.SIGCHLD, ctypes.c_long(seconds)) > 0
