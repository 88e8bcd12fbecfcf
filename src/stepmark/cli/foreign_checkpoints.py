"""What `stepmark inspect`, `verify` and `consolidate` do with checkpoints of other tools."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from stepmark.checkpoint.format.checkpoint_folders import checkpoints
from stepmark.checkpoint.format.manifest import MANIFEST, VALUES
from stepmark.cli.import_command import config_file, lines, summary
from stepmark.config.quiet_libraries import leave_out_torch_xla
from stepmark.errors import CheckpointDamaged, CheckpointMismatch, UsageError
from stepmark.liveness.gc_pause import without_collection
from stepmark.trainer.telemetry.progress import aligned

if TYPE_CHECKING:
    from stepmark.interchange.sources.foreign import ForeignCheckpoint


def is_foreign(path: Path) -> bool:
    """Whether the path is a checkpoint of another tool, and neither ours nor a run with checkpoints of ours."""
    files = [folder / name for folder in (path, *checkpoints(path)) for name in (MANIFEST, VALUES)]
    if not path.exists() or any(file.is_file() for file in files):
        return False
    from stepmark.interchange.recognition import format_of  # which imports torch

    return format_of(path) is not None


def _open(path: Path, config: Path | None) -> ForeignCheckpoint:
    """Opens it; without its optimizer where that needs the model's config."""
    from stepmark.interchange.recognition import open_foreign
    from stepmark.interchange.sources.foreign import ImportOptions

    leave_out_torch_xla()
    options = ImportOptions(config=config_file(config))
    try:
        return open_foreign(path, options)
    except CheckpointMismatch as error:
        if "--config" not in str(error):
            raise
        found = open_foreign(path, replace(options, model_only=True))
        found.lost.append(f"optimizer: {error}")
        return found


def show_foreign(path: Path, config: Path | None, as_json: bool) -> int:
    """Prints what a checkpoint of another tool holds; returns 0. Raises CheckpointError."""
    found = _open(path, config)
    if as_json:
        tensors = [
            {"name": name, "dtype": each.dtype, "shape": list(each.shape), "pieces": len(each.pieces)}
            for name, each in found.model.items()
        ]
        print(json.dumps({**summary(found), "tensors": tensors}, indent=2))
        return 0
    rows = [
        (name, each.dtype, str(list(each.shape)), f"{len(each.pieces)} pieces" if len(each.pieces) > 1 else "1 file")
        for name, each in found.model.items()
    ]
    listed = [f"  {line}" for line in aligned(rows)]
    print("\n".join([*lines(found), "", "model:", *listed]))
    return 0


def verify_foreign(path: Path, config: Path | None, as_json: bool) -> int:
    """Checks that nothing is missing, and the checksums that its files have; returns 1 where something is wrong.

    Raises CheckpointMismatch where the files alone do not tell.
    """
    from stepmark.interchange.sinks.stepmark_checkpoint import verify_records

    problem, size, kind = None, 0, "unknown"
    try:
        found = _open(path, config)
        kind = found.kind
        for tensor in found.tensors():
            tensor.check()
        size = verify_records(found)
    except CheckpointDamaged as error:
        problem = str(error)
    if as_json:
        print(json.dumps({"path": str(path), "kind": kind, "bytes": size, "good": problem is None, "problem": problem}))
    elif problem is not None:
        print(f"{path}: corrupted or incomplete: {problem}")
    else:
        unchecked = "; the rest has no checksums" if size else "; its files have no checksums"
        print(f"{path}: {kind}, complete, {size / 1e6:.1f} MB verified{unchecked}")
    return 0 if problem is None else 1


@without_collection()
def consolidate_foreign(parsed: argparse.Namespace, max_shard: int) -> int:
    """Writes the model of a checkpoint of another tool, as `stepmark import --model-only` does; returns 0.

    Raises UsageError for options of our own checkpoints, and as that command does.
    """
    from stepmark.cli.progress import BytesProgress
    from stepmark.interchange.recognition import open_foreign
    from stepmark.interchange.sinks.hf_model import write_model_folder
    from stepmark.interchange.sources.foreign import ImportOptions

    if parsed.merge_adapters:
        raise UsageError(f"--merge-adapters: {parsed.source} is another tool's; leave it out, and merge with peft")
    leave_out_torch_xla()
    try:
        with BytesProgress("consolidating") as listener:
            found = open_foreign(parsed.source, ImportOptions(model_only=True))
            size = write_model_folder(found, parsed.out, listener, max_shard, parsed.format)
    except CheckpointMismatch as error:
        where = f" (of `stepmark import {parsed.source} {parsed.out} --model-only`)" if "--" in str(error) else ""
        raise CheckpointMismatch(f"{error}{where}") from error
    print("\n".join([*lines(found), f"consolidated into {parsed.out}: {size / 1e6:,.1f} MB"]))
    return 0
