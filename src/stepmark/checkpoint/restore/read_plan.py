"""What to read from a checkpoint, and what to do with it once it is read: data, which `apply` carries out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from stepmark.checkpoint.format.manifest import TensorEntry
from stepmark.checkpoint.restore.tensor_reader import ReadTarget, TensorReader
from stepmark.checkpoint.sections import Entry, Section
from stepmark.errors import CheckpointMismatch
from stepmark.filesystem.json_values import TAG, decode, dicts_in
from stepmark.runtime.base import Runtime
from stepmark.sharding.dtensor import shard_of, with_local
from stepmark.sharding.layout import Layout, Shape

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Names = set[tuple[str, str]]


@dataclass(frozen=True)
class Load:
    """Gives `receiver` a value, as of state.json: `stored`, in which `fill` puts what was read for its `tensors`."""

    receiver: Callable[[Any], object]
    stored: Any
    tensors: Mapping[Any, ReadTarget]
    fill: Callable[[Any, Callable[[Any], Any]], Any] = decode


class Clear(NamedTuple):
    """Makes states zero that the checkpoint has not, each with its parameter, unless the optimizer forgets them."""

    optimizer: Any
    states: Sequence[tuple[str, Entry]]


class ReadPlan:
    """The tensors to read from a checkpoint, whose values in state.json are `values`, and the `actions` to take then,
    in the order of the state's sections."""

    def __init__(self, reader: TensorReader, values: Mapping[str, Any], runtime: Runtime) -> None:
        self.reader = reader
        self.manifest = reader.manifest
        self.where = str(reader.folder)
        self.values = values
        self.runtime = runtime
        self.targets: list[ReadTarget] = []
        self.actions: list[Load | Clear] = []
        self.groups: set[str] = set()  # that have to be expected entirely
        self.expected: Names = set()

    def read(self) -> None:
        """Fills the targets. Raises CheckpointDamaged."""
        self.reader.fill(self.targets, self.runtime)

    def unexpected(self) -> Names:
        """Tensors of the compared sections that are in the checkpoint, and not here."""
        stored = {(group, name) for group in self.groups for name in self.manifest.tensors.get(group, ())}
        return stored - self.expected

    def stored(self, group: str) -> Mapping[str, TensorEntry]:
        return self.manifest.tensors.get(group, {})

    def want(self, group: str, name: str, live: Tensor | None, layout: Layout, dtype: str) -> ReadTarget:
        """A tensor to be read into `live`, or where that is None into a new one.

        Raises CheckpointMismatch where the checkpoint does not have it, or has another shape or dtype.
        """
        entry = self.stored(group).get(name)
        if entry is None or (entry.dtype, entry.shape) != (dtype, layout.shape):
            wanted = f"{dtype} {list(layout.shape)}"
            raise CheckpointMismatch(
                f"{self.where} has no tensor {name!r}; the state here expects {wanted}"
                if entry is None
                else f"tensor {name!r} is {entry.dtype} {list(entry.shape)} in {self.where} and {wanted} here"
            )
        target = ReadTarget(group, name, layout, dtype, live)
        self.targets.append(target)
        self.expected.add((group, name))
        return target

    def want_new(self, group: str, name: str, layout: Layout | None = None, shape: Shape | None = None) -> ReadTarget:
        """A tensor to be read into a new one: the complete tensor, or the slices of `layout` into one of `shape`.

        Raises CheckpointMismatch where the checkpoint does not have it.
        """
        entry = self.stored(group).get(name)
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
    return list(dict.fromkeys(str(item["v"]) for item in dicts_in(encoded) if item.get(TAG) == "tensor"))


def reference(name: str) -> dict[str, str]:
    """The encoded value that is the tensor of this name."""
    return {TAG: "tensor", "v": name}


def items(encoded: Mapping[str, Any]) -> Mapping[str, Any]:
    """Encoded values by key as one, whatever the keys are."""
    return {TAG: "dict", "v": [[key, value] for key, value in encoded.items()]} if TAG in encoded else encoded
