"""Communication among ranks through the host: small plain values, never tensors of the model.

It owns torch.distributed's process groups, so that they can be released before the interpreter exits. A gloo group has
threads, which may hold the last reference to a tensor of a finished collective. Releasing it needs the interpreter, and
a thread that enters an exiting interpreter aborts the process. The threads are joined once nothing refers to their
group.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from stepmark.errors import PeerFailed
from stepmark.liveness.bounded_call import BoundedCall
from stepmark.liveness.failure_report import TIMED_OUT, describe_lost_peer, is_lost_peer
from stepmark.liveness.messages import pack, unpack
from stepmark.liveness.progress import current

_PROBE = 0x5EE  # the tag of messages that no rank receives
_NOTICED = 1.0  # seconds after which all connections to a rank that has ended are known to be lost
_STORE_SECONDS = 1.0  # that a question to the ranks' store may take
_held: weakref.WeakSet[Group] = weakref.WeakSet()


def launcher_serves() -> bool:
    """Whether the launcher, torchrun's agent, serves the store, which then outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


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


def gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The values of all ranks of a process group, by rank; collective."""
    device = distributed_c10d._get_object_coll_device(group)
    own = torch.frombuffer(bytearray(pack(value)), dtype=torch.uint8).to(device)
    sizes = [own.new_empty(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([own.numel()], device=device), group=group)
    lengths = [int(size) for size in sizes]
    padded, parts = own.new_zeros(max(lengths)), [own.new_empty(max(lengths)) for _ in lengths]
    padded[: own.numel()] = own
    dist.all_gather(parts, padded, group=group)
    return [unpack(part[:size].cpu().numpy().tobytes()) for part, size in zip(parts, lengths, strict=True)]


def wait_for(works: Iterable[dist.Work]) -> None:
    """Waits for transfers, once all are started; a training thread counts for how long."""
    started, began = list(works), time.perf_counter()
    for work in started:
        work.wait()
    if (progress := current()) is not None:
        progress.waited += time.perf_counter() - began


class HostGroup:
    """All ranks of a run, or some, connected by gloo; a single rank needs no connection. `all_gather`, `broadcast` and
    `barrier` are collective: all ranks call them, in the same order."""

    lost = False  # an error of this rank has told that another one is gone

    def __init__(self, rank: int = 0, size: int = 1, process_group: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.size = size
        self._group = Group(process_group)
        self._store_answers = True

    @classmethod
    def of_processes(cls, timeout: timedelta | None = None, among: dist.ProcessGroup | None = None) -> HostGroup:
        """The ranks of torch's default process group, or `among` some, on a separate gloo group; a single rank without
        one. Ranks count from 0 in the group."""
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(among) == 1:
            return cls()
        ranks = None if among is None else dist.get_process_group_ranks(among)
        # torch's own, since torch_xla's in its place lacks an argument
        own = distributed_c10d.new_group(ranks, timeout, backend="gloo", use_local_synchronization=among is not None)
        return cls(dist.get_rank(own), dist.get_world_size(own), own)

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank."""
        if self.size == 1:
            return [value]
        values = gather(value, self._group.process_group)
        return [type(value)(**each) for each in values] if is_dataclass(value) else values  # type: ignore[misc]

    def broadcast(self, value: Any = None, source: int = 0) -> Any:
        """The value that rank `source` passed."""
        if self.size == 1:
            return value
        packed = bytearray(pack(value)) if self.rank == source else bytearray()
        size = torch.tensor(len(packed))
        dist.broadcast(size, group_src=source, group=self._group.process_group)
        data = torch.frombuffer(packed or bytearray(int(size)), dtype=torch.uint8)
        dist.broadcast(data, group_src=source, group=self._group.process_group)
        return unpack(data.numpy().tobytes())

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        self.all_gather(None)

    # Not collective

    def is_gone(self, rank: int) -> bool:
        """Whether the connection to another rank is lost, because its process has ended. A stopped process is not gone;
        a machine without power is not noticed."""
        if self.size == 1 or rank == self.rank or not dist.is_initialized():
            return False
        try:
            dist.isend(torch.empty(1), group=self._group.process_group, group_dst=rank, tag=_PROBE)
        except RuntimeError as error:
            return is_lost_peer(error)
        return False

    def gone(self) -> str:
        """The ranks that are gone, for a message; empty where there are none."""
        return ", ".join(f"rank {rank}" for rank in range(self.size) if self.is_gone(rank))

    def explain(self, error: BaseException | None) -> PeerFailed | None:
        """PeerFailed for torch's error of a collective that has lost a rank or timed out; None for other errors. From
        now on the group knows that a rank is lost."""
        self.lost = self.lost or is_lost_peer(error)
        if not isinstance(error, RuntimeError) or not (is_lost_peer(error) or TIMED_OUT.search(str(error))):
            return None
        until = time.monotonic() + _NOTICED
        while not (gone := self.gone()) and is_lost_peer(error) and time.monotonic() < until:
            time.sleep(_NOTICED / 20)
        return PeerFailed(describe_lost_peer(str(error), gone or "another rank"))

    def store(self, prefix: str) -> dist.Store:
        """The ranks' store, of names that begin with `prefix`."""
        return dist.PrefixStore(prefix, distributed_c10d._get_default_store())

    def tell(self, topic: str, text: str) -> None:
        """Puts a text into the ranks' store, if that answers."""
        self._ask_store(lambda store: store.set(topic, pack(text)))  # type: ignore[arg-type]

    def told(self, topic: str) -> str | None:
        """The text that a rank has put there under the topic; None without one, or if the store does not answer."""
        return self._ask_store(lambda store: unpack(store.get(topic)) if store.check([topic]) else None)

    def _ask_store(self, ask: Callable[[dist.Store], str | None]) -> str | None:
        if self.size == 1 or not self._store_answers:
            return None
        call = BoundedCall(lambda: ask(distributed_c10d._get_default_store()), raises=True)
        self._store_answers = call.ended(_STORE_SECONDS)
        with contextlib.suppress(RuntimeError, ValueError):  # the rank that serves it is gone, or this one has left
            return call.result() if self._store_answers else None
        return None
