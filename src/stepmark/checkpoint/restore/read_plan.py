"""What to read from a checkpoint, and what to set afterwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from stepmark.checkpoint.format.manifest import Manifest, TensorEntry
from stepmark.checkpoint.restore.tensor_reader import ReadTarget, check_entry
from stepmark.checkpoint.sections import Section
from stepmark.errors import CheckpointMismatch
from stepmark.filesystem.json_values import TAG, dicts_in
from stepmark.runtime.base import Runtime
from stepmark.sharding.dtensor import shard_of, with_local
from stepmark.sharding.layout import Layout, Shape

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Names = set[tuple[str, str]]


class ReadPlan:
    """The tensors to read from one checkpoint, and the functions to call once they are read."""

    def __init__(self, manifest: Manifest, runtime: Runtime, where: str) -> None:
        self.manifest = manifest
        self.runtime = runtime
        self.where = where
        self.targets: list[ReadTarget] = []
        self.expected: Names = set()
        self.finishers: list[Callable[[], None]] = []

    def finish(self) -> None:
        """Sets everything other than live tensors, once all targets are filled."""
        for finisher in self.finishers:
            finisher()

    def stored(self, group: str) -> dict[str, TensorEntry]:
        """The checkpoint's tensors in a group."""
        return dict(self.manifest.tensors.get(group, {}))

    def want(self, group: str, name: str, live: Tensor | None, layout: Layout, dtype: str) -> ReadTarget:
        """A tensor to be read into `live`, or where that is None into a new one.

        Raises CheckpointMismatch where the checkpoint does not have it, or has another shape or dtype.
        """
        target = ReadTarget(group, name, layout, dtype, live)
        check_entry(self.manifest.tensors.get(group, {}).get(name), target, self.where)
        self.targets.append(target)
        self.expected.add((group, name))
        return target

    def want_new(self, group: str, name: str, layout: Layout | None = None, shape: Shape | None = None) -> ReadTarget:
        """A tensor to be read into a new one: the complete tensor, or the slices of `layout` into one of `shape`.

        Raises CheckpointMismatch where the checkpoint does not have it.
        """
        entry = self.manifest.tensors.get(group, {}).get(name)
        if entry is None:
            raise CheckpointMismatch(f"{self.where} has no tensor {name!r}, but its stored values refer to it")
        target = self.want(group, name, None, layout or Layout.full(entry.shape), entry.dtype)
        target.shape = shape
        return target

    def want_placed(self, group: str, name: str, like: DTensor) -> ReadTarget:
        """A tensor to be read into a new DTensor that is placed as `like`; raises as `want_new`."""
        shard = shard_of(like)
        target = self.want_new(group, name, shard.layout, tuple(shard.tensor.shape))
        target.place = partial(with_local, like)
        return target

    def new(self, section: Section, name: str) -> ReadTarget:
        """A tensor to be read into a new one: a DTensor where the section has one of this name."""
        like = section.dtensors.get(name)
        return self.want_new(section.group, name) if like is None else self.want_placed(section.group, name, like)

    def tensors_in(self, section: Section, encoded: Any) -> dict[str, ReadTarget]:
        """New tensors for all that an encoded value refers to."""
        return {name: self.new(section, name) for name in tensor_names(encoded)}


def tensor_names(encoded: Any) -> list[str]:
    """The names of the tensors that an encoded value refers to."""
    found = (item["v"] for item in dicts_in(encoded) if item.get(TAG) == "tensor")
    return list(dict.fromkeys(map(str, found)))
