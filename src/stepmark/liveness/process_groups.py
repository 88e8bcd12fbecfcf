"""Owns torch.distributed's process groups, so that they can be released before the interpreter exits.

A gloo group has threads, which may hold the last reference to a tensor of a finished collective. Releasing it needs the
interpreter, and a thread that enters an exiting interpreter aborts the process. The threads are joined once nothing
refers to their group.
"""

from __future__ import annotations

import gc
import weakref

import torch.distributed as dist

_held: weakref.WeakSet[Group] = weakref.WeakSet()


class Group:
    """A process group, valid until `leave`; None is the default group."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group
        _held.add(self)


def leave() -> None:
    """Destroys all groups and their threads; no communication is possible afterwards."""
    for group in list(_held):
        group.process_group = None
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # reference cycles that contain a group
