"""Folders of torch.distributed.checkpoint, which `dcp.load` reads into any state that has these names.

`model.NAME` and `optimizer.state.NAME.KEY` have Hugging Face's names. The settings of parameter groups are there twice,
by number, as `get_optimizer_state_dict` gives them, and by name, as with `flatten_optimizer_state_dict`: a reader asks
for those that its own state has. Tensors are cut into chunks of rows, so that a rank reads little more than it needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from stepmark.checkpoint.format.dtypes import DTYPES
from stepmark.checkpoint.format.manifest import MASTER
from stepmark.errors import CheckpointMismatch
from stepmark.interchange.sinks.export_plan import ExportPlan, optimizer_of
from stepmark.interchange.sources import torchtitan
from stepmark.interchange.sources.dcp_store import METADATA
from stepmark.interchange.sources.foreign import ForeignCheckpoint
from stepmark.model_folder.output_files import ArchivesFile, DataFile, OutputFile, copied_files
from stepmark.sharding.layout import Shape
from stepmark.tensor_files.global_tensor import GlobalTensor
from stepmark.tensor_files.pickle_reader import PickledName
from stepmark.tensor_files.torch_writer import Call, Instance, TorchArchive, dumps

CHUNK = 64 << 20  # bytes of a tensor in one record, unless a row has more
FILE = 2 << 30  # bytes of a file, at most about so many
_MASTERS = (
    "the weights are in the model's own type; the fp32 master weights are the states optimizer.state.NAME.master, "
    "which no torch optimizer asks for"
)

_METADATA = "torch.distributed.checkpoint.metadata"
_BYTES = Instance(PickledName(f"{_METADATA}.BytesStorageMetadata"), {})
_STORAGE_INFO = PickledName("torch.distributed.checkpoint.filesystem._StorageInfo")

Path = tuple[str | int, ...]
_Index = tuple[str, Shape | None, int | None]  # of a record: name, where it begins in the tensor, and its number
_Place = tuple[str, int, int]  # file, first byte and size


def _size(shape: Shape) -> Call:
    return Call(PickledName("torch.Size"), (tuple(shape),))


def _properties(dtype: str) -> Instance:
    """torch's TensorProperties: of a strided tensor that needs no gradient and is not pinned."""
    layout = Call(PickledName("torch.serialization._get_layout"), ("torch.strided",))
    memory_format = Call(PickledName(f"{_METADATA}._MEM_FORMAT_ENCODING"), (0,))
    state = (PickledName(f"torch.{DTYPES[dtype][1]}"), layout, False, memory_format, False)
    return Instance(PickledName(f"{_METADATA}.TensorProperties"), state)


def _is_value(value: Any) -> bool:
    """Whether torch.distributed.checkpoint takes a value as one, of those that are no dicts."""
    return not isinstance(value, list) or not any(
        isinstance(item, Mapping) or (isinstance(item, list) and not _is_value(item)) for item in value
    )


@dataclass
class _Writer:
    """Records, with all that the metadata says about them."""

    files: list[ArchivesFile] = field(default_factory=lambda: [ArchivesFile("__0_0.distcp")])
    described: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    places: dict[_Index, _Place] = field(default_factory=dict)
    _known: dict[int, tuple[Any, str, list[_Index]]] = field(default_factory=dict)  # tensors written, their records

    def add(self, path: Path, value: Any) -> None:
        """A tensor, or a plain value, at the end of a path of keys. Dicts, and lists of dicts, are part of the path."""
        if isinstance(value, Mapping):
            for key, item in value.items():
                self.add((*path, str(key)), item)
            return
        if not _is_value(value):
            for number, item in enumerate(value):
                self.add((*path, number), item)
            return
        name = ".".join(map(str, path))
        self.paths[name] = path
        if isinstance(value, GlobalTensor):
            self._add_tensor(name, value)
        else:
            self.described[name] = _BYTES
            self._place((name, None, None), TorchArchive(value))

    def _add_tensor(self, name: str, value: GlobalTensor) -> None:
        if id(value) in self._known:  # another name of it: the same records, not a copy
            _, other, records = self._known[id(value)]
            self.described[name] = self.described[other]
            self.places |= {(name, *index[1:]): self.places[index] for index in records}
            return
        shape = value.shape
        chunks: list[Instance] = []
        records = []
        for number, (start, rows, part) in enumerate(_chunks(value)):
            sizes = (rows, *shape[1:]) if shape else ()
            offsets = (start, *(0 for _ in shape[1:])) if shape else ()
            described = {"offsets": _size(offsets), "sizes": _size(sizes)}
            chunks.append(Instance(PickledName(f"{_METADATA}.ChunkStorageMetadata"), described))
            records.append((name, offsets, number))
            self._place(records[-1], TorchArchive(part))
        self._known[id(value)] = value, name, records  # an id is that of no other tensor while it is kept
        tensor_state = {"properties": _properties(value.dtype), "size": _size(shape), "chunks": chunks}
        self.described[name] = Instance(PickledName(f"{_METADATA}.TensorStorageMetadata"), tensor_state)

    def _place(self, index: _Index, archive: TorchArchive) -> None:
        if self.files[-1].length and self.files[-1].length + archive.size > FILE:
            self.files.append(ArchivesFile(f"__0_{len(self.files)}.distcp"))
        file = self.files[-1]
        self.places[index] = file.name, file.add(archive), archive.size

    def metadata(self) -> OutputFile:
        """The file that says what there is."""
        records: dict[Instance, Instance] = {}
        for (name, offset, number), (file, begin, length) in self.places.items():
            index = {"fqn": name, "index": number, "offset": None if offset is None else _size(offset)}
            place = {"relative_path": file, "offset": begin, "length": length}
            records[Instance(PickledName(f"{_METADATA}.MetadataIndex"), index)] = Instance(_STORAGE_INFO, place)
        state = {
            "state_dict_metadata": self.described,
            "planner_data": self.paths,
            "storage_data": records,
            "storage_meta": None,
            "version": None,
        }
        return DataFile(METADATA, dumps(Instance(PickledName(f"{_METADATA}.Metadata"), state)))


def _chunks(tensor: GlobalTensor) -> Iterator[tuple[int, int, GlobalTensor]]:
    """First row, rows and part of each chunk."""
    shape = tensor.shape
    if not shape or not math.prod(shape):
        yield 0, shape[0] if shape else 0, tensor
        return
    count = max(1, CHUNK // (tensor.nbytes // shape[0]))
    for start in range(0, shape[0], count):
        length = min(count, shape[0] - start)
        yield start, length, tensor.narrow(0, start, length)


def plan(source: ForeignCheckpoint, titan: bool) -> ExportPlan:
    """The files of a store; `titan`: with torchtitan's names."""
    if source.adapter:
        raise CheckpointMismatch(f"{source.folder} is of an adapter, which --to dcp does not write; use hf-trainer")
    optimizer = optimizer_of(source)
    writer = _Writer()
    for path, value in _values(torchtitan.exported(source) if titan else source, titan):
        writer.add(path, value)
    found = ExportPlan([*writer.files, writer.metadata(), *copied_files(source.files)])
    if any(MASTER in state for state in optimizer.states.values()):
        found.notes.append(_MASTERS)
    if titan:
        found.notes.append("torchtitan: leave the data loader out with checkpoint.exclude_from_loading = dataloader")
    return found


def _values(source: ForeignCheckpoint, titan: bool) -> Iterator[tuple[Path, Any]]:
    """What there is, with the keys on the way to it: as torchtitan's trainer has it, whose optimizer is flattened, or
    nested, with the groups by number too."""
    optimizer = optimizer_of(source)
    tied = {} if titan else {name: source.model[kept] for name, kept in source.tied.items() if kept in source.model}
    for name, tensor in (*source.model.items(), *tied.items()):
        yield (name,) if titan else ("model", name), tensor
    parts = [("state", name, state) for name, state in optimizer.states.items()]
    for number, group in enumerate(optimizer.groups):
        if not titan:
            yield from ((("optimizer", "param_groups", number, key), value) for key, value in group.items())
        settings = {key: value for key, value in group.items() if key != "params"}
        parts += [("param_groups", name, settings) for name in group["params"]]
    for kind, name, values in parts:
        for key, value in values.items():
            yield ("optimizer", f"{kind}.{name}.{key}") if titan else ("optimizer", kind, name, key), value
    for key, value in (source.schedule or {}).items():
        yield ("lr_scheduler" if titan else "scheduler", key), value
    yield ("train_state", "step") if titan else ("step",), source.step or 0
    if titan:
        yield ("train_state", "ntokens_seen"), int((source.trainer_state or {}).get("num_input_tokens_seen") or 0)
