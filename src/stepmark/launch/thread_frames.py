"""Where another thread is."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

_collecting = threading.Lock()


def frame_of(thread: int) -> FrameType | None:
    """The frame that the thread of this identity executes, for the calling one that of the caller; None where it has
    ended.

    Python 3.11 may collect garbage while it gathers the frames of all threads, and then holds a lock that the end of a
    `threading.local` waits for: the process would hang for ever (CPython issue 106883). So nothing is collected
    meanwhile.
    """
    with _collecting:
        enabled = gc.isenabled()
        gc.disable()
        try:
            frame = sys._current_frames().get(thread)
        finally:
            if enabled:
                gc.enable()
    return frame.f_back if frame is not None and thread == threading.get_ident() else frame
