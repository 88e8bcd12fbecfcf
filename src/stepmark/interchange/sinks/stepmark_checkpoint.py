"""Writes what was found in a checkpoint of another tool as an ordinary Stepmark checkpoint.

The folder is written under a hidden name beside the final one, with the engine's own plan, headers and manifest, and
renamed when it is complete: after an error nothing is there.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.block_io import FileOutput
from stepmark.checkpoint.format.checkpoint_folders import step_of
from stepmark.checkpoint.format.checksums import CHECKSUM_BLOCK, block_checksum, bytes_checksum, checksum_blocks
from stepmark.checkpoint.format.manifest import ADAPTER, MODEL, OPTIMIZER, WRITTEN, Manifest
from stepmark.checkpoint.save.commit import Commit, values_to_bytes
from stepmark.checkpoint.save.plan import Holding, PlannedFile, SliceRecord, plan_save
from stepmark.checkpoint.save.write import write_header
from stepmark.checkpoint.threads import in_parallel
from stepmark.checkpoint.timestamps import TimestampSource
from stepmark.errors import UsageError
from stepmark.filesystem.json_values import encode_plain
from stepmark.interchange.sinks.imported_state import metrics_of, run_values, trainer_state_bytes
from stepmark.interchange.sources.foreign import TRAINER_STATE, ForeignCheckpoint, ForeignOptimizer
from stepmark.model_folder.new_folder import WritingListener, check_out
from stepmark.model_folder.output_files import THREADS, DataFile, WriteTensors, copied_files, write_folder
from stepmark.runtime.versions import software_versions
from stepmark.sharding.layout import TensorSlice
from stepmark.tensor_files.global_tensor import GlobalTensor
from stepmark.tensor_files.streaming import WrittenTensor

SECTION = "optimizer"
GROUP = f"{OPTIMIZER}/{SECTION}"


def write_checkpoint(source: ForeignCheckpoint, out: Path, listener: WritingListener) -> int:
    """Writes the checkpoint as the folder `out`; returns the bytes of its files. Nothing is left after an error.

    Raises UsageError where `out` is in use, or has the name of another step's checkpoint, CheckpointDamaged where the
    source is incomplete or corrupted, and CheckpointError where `out` cannot be written.
    """
    final = check_out(out, source.folder)
    step = source.step or 0
    if step_of(final) not in (None, step):
        raise UsageError(
            f"{out} has the name of another step: {source.folder} is of step {step}; name it checkpoint-{step}"
        )
    tensors = _tensors(source)
    for tensor in tensors.values():
        tensor.check()
    save = uuid.uuid4().hex[:16]
    rows = [
        SliceRecord(group, name, t.dtype, t.shape, TensorSlice.full(t.shape)) for (group, name), t in tensors.items()
    ]
    plan = plan_save([Holding(tuple(rows), (0,))], [0], save)
    tensor_files = [_TensorFile(file, tensors, step, save) for file in plan.files]
    extra = [*source.files, TRAINER_STATE]
    commit = Commit(_values(source), extra, _manifest(source, save), lambda: False, TimestampSource())
    sizes = []

    def finish(folder: Path) -> None:
        headers = {index: file.checksum for index, file in enumerate(tensor_files)}
        sizes.append(commit.write_manifest(folder, plan, headers))

    planned = [*tensor_files, *copied_files(source.files), DataFile(TRAINER_STATE, trainer_state_bytes(source))]
    write_folder(planned, source.records, final, out, listener, finish)
    return sizes[0]


@dataclass
class _TensorFile:
    """A tensor file of the plan; `checksum` is its header's."""

    file: PlannedFile
    tensors: Mapping[tuple[str, str], GlobalTensor]
    step: int
    save: str
    checksum: str = ""

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def size(self) -> int:
        return self.file.data_size

    def write(self, path: Path, write_tensors: WriteTensors) -> None:
        file = self.file
        checksums: dict[str, dict[int, str]] = {stored.name: {} for stored in file.tensors}
        places = [
            WrittenTensor(
                self.tensors[file.group, stored.name],
                file.header_size + stored.begin,
                partial(_add_checksums, checksums[stored.name], stored.begin),
            )
            for stored in file.tensors
        ]
        with FileOutput(path, file.size) as output:
            write_tensors(places, output, file.header_size)  # its checksum blocks begin there
        folder = path.parents[len(Path(file.name).parts) - 1]
        self.checksum = bytes_checksum(write_header(folder, file, self.step, self.save, checksums))


def _add_checksums(found: dict[int, str], origin: int, begin: int, data: memoryview | None) -> None:
    """The checksums of the blocks of a tensor that begins at byte `origin` of the file's data."""
    if data is not None:
        first = origin // CHECKSUM_BLOCK
        for low, high in checksum_blocks(origin + begin, origin + begin + len(data)):
            found[low // CHECKSUM_BLOCK - first] = block_checksum(data[low - origin - begin : high - origin - begin])


def _tensors(source: ForeignCheckpoint) -> dict[tuple[str, str], GlobalTensor]:
    """All tensors by group and name."""
    found = {(ADAPTER if source.adapter else MODEL, name): tensor for name, tensor in source.model.items()}
    if source.optimizer is not None:
        for parameter, state in source.optimizer.states.items():
            for key, value in state.items():
                if isinstance(value, GlobalTensor):
                    found[GROUP, f"{parameter}/{key}"] = value
    return found


def _values(source: ForeignCheckpoint) -> bytes:
    """The contents of state.json."""
    model = {"kind": "module", "class": source.architecture or "Module", "tied": dict(source.tied), "extra": {}}
    sections: dict[str, Any] = {MODEL: model | ({WRITTEN: source.written} if source.written else {})}
    if source.optimizer is not None:
        sections[SECTION] = {"kind": "named", **_optimizer_values(source.optimizer)}
        sections["run"] = {"kind": "object", "value": encode_plain(run_values(source, source.optimizer), "run")}
    for name in source.prefixes.keys() & sections.keys():
        sections[name]["prefix"] = source.prefixes[name]
    return values_to_bytes(sections)


def _optimizer_values(optimizer: ForeignOptimizer) -> dict[str, Any]:
    groups, members = {}, {}
    for index, group in enumerate(optimizer.groups):
        plain = {key: value for key, value in group.items() if key != "params"}
        groups[str(index)] = encode_plain(plain, f"param_groups[{index}]")
        members.update(dict.fromkeys(group["params"], index))
    state = {}
    for name, values in optimizer.states.items():
        rest = {key: value for key, value in values.items() if not isinstance(value, GlobalTensor)}
        if rest:
            state[name] = encode_plain(rest, name)
    return {"state": state, "groups": groups, "members": members}


def _manifest(source: ForeignCheckpoint, save: str) -> Manifest:
    """The manifest without files and tensors."""
    versions = software_versions()
    software: dict[str, str] = {name: versions[name] for name in ("stepmark", "torch", "python") if name in versions}
    model_only = source.optimizer is None
    imported = {"kind": source.kind, "mesh": dict(source.mesh), "assumed": source.assumed, "lost": source.lost}
    said = {"imported": imported, "identity": source.identity, "model_only": model_only}
    sections = {MODEL: "module", **({} if model_only else {SECTION: "named", "run": "object"})}
    return Manifest(
        step=source.step or 0,
        save=save,
        time=0.0,
        software=software,
        world_size=1,
        mesh={"dp": 1},
        model_only=model_only,
        sections=sections,
        metrics=encode_plain(metrics_of(source), "metrics"),
        metadata=encode_plain(said, "metadata"),
    )


def verify_records(source: ForeignCheckpoint) -> int:
    """Verifies the checksums of the source's zip archives; returns the bytes read. Raises CheckpointDamaged."""
    return sum(in_parallel(lambda record: record.check(), source.records, THREADS))
