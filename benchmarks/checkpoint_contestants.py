"""Ways to bring a dict of tensors to disk and back, each as its own documentation says.

A contestant saves the state into a folder that is given to it (`save` returns when training may go on, `finish` when
the bytes are on the disk) and restores it into the tensors of the state, every byte. `warm` ones are measured at their
second save: what they allocate once is there then. Threads are those of the whole benchmark.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from stepmark import Checkpointer

State = dict[str, Tensor]
BLOCK = 8 << 20  # bytes that the raw contestants write, read and copy at a time


def sync_tree(folder: Path) -> None:
    """Returns when all files below the folder, and their names, are on the disk."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def huge_memory(size: int) -> mmap.mmap:
    """Page-aligned memory, touched."""
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_HUGEPAGE)
    for begin in range(0, size, mmap.PAGESIZE):
        memory[begin] = 1
    return memory


def copy_blocks(pairs: Iterable[tuple[int, int, int]], threads: int) -> None:
    """memcpy of (target, source, bytes), in blocks, by so many threads."""
    blocks = [(t + at, s + at, min(BLOCK, n - at)) for t, s, n in pairs for at in range(0, n, BLOCK)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda block: ctypes.memmove(*block), blocks))


class Contestant:
    """`state` is what is saved and restored into."""

    warm = False
    asynchronous = False
    fills = True  # restoring gives the state its values

    def __init__(self, state: State, threads: int, base: Path) -> None:
        self.state = state
        self.threads = threads
        self.base = base

    def save(self, folder: Path) -> None:
        raise NotImplementedError

    def finish(self, folder: Path) -> None:
        sync_tree(folder)

    def restore(self, folder: Path) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Ends what goes on."""


class Memcpy(Contestant):
    """The same bytes copied to touched memory."""

    warm = True

    def __init__(self, state: State, threads: int, base: Path) -> None:
        super().__init__(state, threads, base)
        self.memory = huge_memory(sum(tensor.nbytes for tensor in state.values()))

    def save(self, folder: Path) -> None:
        at = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        pairs = []
        for tensor in self.state.values():
            pairs.append((at, tensor.data_ptr(), tensor.nbytes))
            at += tensor.nbytes
        copy_blocks(pairs, self.threads)

    def finish(self, folder: Path) -> None:
        pass


class NewMemory(Contestant):
    """No file: the state's bytes in memory that nobody has touched before."""

    fills = False

    def save(self, folder: Path) -> None:
        pass

    def restore(self, folder: Path) -> None:
        for tensor in self.state.values():
            torch.empty_like(tensor).zero_()


class Raw(Contestant):
    """One file, through the page cache, written from the state's memory and read into it."""

    flag = 0

    def blocks(self) -> Iterator[tuple[int, memoryview]]:
        """Where in the file, and the memory: the tensors follow one another there as in the file."""
        first = next(iter(self.state.values())).data_ptr()
        size = sum(tensor.nbytes for tensor in self.state.values())
        assert [tensor.data_ptr() - first for tensor in self.state.values()] == [
            *accumulate([tensor.nbytes for tensor in self.state.values()][:-1], initial=0)
        ]
        memory = memoryview((ctypes.c_char * size).from_address(first)).cast("B")
        for at in range(0, size, BLOCK):
            yield at, memory[at : at + BLOCK]

    def save(self, folder: Path) -> None:
        descriptor = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT | self.flag)
        for at, block in self.blocks():
            assert os.pwrite(descriptor, block, at) == len(block)
        os.fsync(descriptor)
        os.close(descriptor)

    def restore(self, folder: Path) -> None:
        descriptor = os.open(folder / "raw", os.O_RDONLY | self.flag)
        for at, block in self.blocks():
            assert os.preadv(descriptor, [block], at) == len(block)
        os.close(descriptor)


class RawDirect(Raw):
    """The same, past the page cache."""

    flag = os.O_DIRECT


class Stepmark(Contestant):
    warm = True
    asynchronous = True

    def __init__(self, state: State, threads: int, base: Path) -> None:
        super().__init__(state, threads, base)
        self.step = 0
        self.checkpointer = Checkpointer(base / "stepmark", threads=threads)

    def save(self, folder: Path) -> None:
        self.step += 1
        self.handle = self.checkpointer.save(self.step, {"state": self.state})

    def finish(self, folder: Path) -> None:
        assert self.handle is not None
        self.handle.result()

    def restore(self, folder: Path) -> None:
        assert self.checkpointer.restore({"state": self.state}) == 1 + self.warm

    def close(self) -> None:
        self.checkpointer.close()


class TorchSave(Contestant):
    def save(self, folder: Path) -> None:
        torch.save(self.state, folder / "state.pt")

    def restore(self, folder: Path) -> None:
        loaded = torch.load(folder / "state.pt", weights_only=True)
        for name, tensor in self.state.items():
            tensor.copy_(loaded.pop(name))


class Safetensors(Contestant):
    def save(self, folder: Path) -> None:
        safetensors.torch.save_file(self.state, folder / "state.safetensors")

    def restore(self, folder: Path) -> None:
        with safetensors.safe_open(folder / "state.safetensors", framework="pt") as file:
            for name, tensor in self.state.items():
                tensor.copy_(file.get_tensor(name))


class Dcp(Contestant):
    def save(self, folder: Path) -> None:
        writer = dcp.FileSystemWriter(folder, thread_count=self.threads)  # it syncs its files
        dcp.save(dict(self.state), storage_writer=writer, no_dist=True)

    def restore(self, folder: Path) -> None:
        dcp.load(dict(self.state), storage_reader=dcp.FileSystemReader(folder), no_dist=True)


class DcpAsync(Dcp):
    """With the staging that it does by itself."""

    warm = True
    asynchronous = True

    def stager(self) -> Any:
        return None

    def __init__(self, state: State, threads: int, base: Path) -> None:
        super().__init__(state, threads, base)
        self._stager = self.stager()
        self._writer: Any = None

    def save(self, folder: Path) -> None:
        if self._writer is None:
            self._writer = dcp.FileSystemWriter(folder, thread_count=self.threads)
        more = {} if self._stager is None else {"async_stager": self._stager}
        result = dcp.async_save(
            dict(self.state), checkpoint_id=folder, storage_writer=self._writer, no_dist=True, **more
        )
        self.future: Any = getattr(result, "upload_completion", result)

    def finish(self, folder: Path) -> None:
        self.future.result()
        sync_tree(folder)


class DcpAsyncStager(DcpAsync):
    """Into memory that its newer stager keeps. (The writer's own `cache_staged_state_dict` pins, which needs CUDA.)"""

    def stager(self) -> Any:
        # What its options would do beyond this needs CUDA, or is for a process of its own.
        return DefaultStager(StagingOptions(False, False, False, False))

    def close(self) -> None:
        self._stager.close()


class XmSave(Contestant):
    """torch_xla's own, of tensors of the device."""

    def save(self, folder: Path) -> None:
        import torch_xla.core.xla_model as xm

        xm.save(self.state, folder / "state.pt")

    def restore(self, folder: Path) -> None:
        import torch_xla

        loaded = torch.load(folder / "state.pt", weights_only=True)
        for name, tensor in self.state.items():
            tensor.copy_(loaded.pop(name))
        torch_xla.sync(wait=True)


CONTESTANTS: dict[str, type[Contestant]] = {
    "memcpy": Memcpy,
    "new memory": NewMemory,
    "raw": Raw,
    "raw, direct": RawDirect,
    "stepmark": Stepmark,
    "torch.save": TorchSave,
    "safetensors": Safetensors,
    "DCP save": Dcp,
    "DCP async_save": DcpAsync,
    "DCP async_save, stager": DcpAsyncStager,
}
ON_XLA: dict[str, type[Contestant]] = {"stepmark": Stepmark, "xm.save": XmSave}
