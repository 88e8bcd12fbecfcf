"""torch.distributed's process groups, each held in one place, so that they can be let go before the interpreter.

A gloo group has threads, and these may be the last to hold a tensor of a collective that has ended. Letting go of it
needs the interpreter, and a thread that asks an interpreter on its way out ends the process with an abort. The threads
are joined when nothing refers to their group.
"""

from __future__ import annotations

import gc
import weakref

import torch.distributed as dist

_held: weakref.WeakSet[Group] = weakref.WeakSet()


class Group:
    """A process group, or with None the default one, until `leave`."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group
        _held.add(self)


def leave() -> None:
    """Ends all groups, with their threads; no rank can be talked to afterwards."""
    for group in list(_held):
        group.process_group = None
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # what refers to a group from a cycle
