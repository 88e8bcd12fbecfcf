"""A Stepmark checkpoint in the form that other tools' checkpoints have here: global tensors by name, and their places.

Shards become pieces, whatever mesh wrote them. Names and headers are read; the tensors' bytes are verified by the
records, and read when they are written elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.checkpoint_folders import find_checkpoints
from stepmark.checkpoint.format.integrity import check_integrity, read_values
from stepmark.checkpoint.format.manifest import ADAPTER, MODEL, OPTIMIZER, STATE, Manifest, read_manifest
from stepmark.checkpoint.format.read_errors import well_formed
from stepmark.errors import CheckpointMismatch, CheckpointNotFound, UsageError
from stepmark.filesystem.json_values import decode, decode_plain
from stepmark.interchange.sources.complete_state import files_beside
from stepmark.interchange.sources.foreign import TRAINER_STATE, ForeignCheckpoint, ForeignOptimizer
from stepmark.interchange.sources.torch_optimizer import scalar
from stepmark.model_folder.adapted_model import ADAPTER_CONFIG
from stepmark.model_folder.checkpoint_tensors import CheckpointTensors, model_group
from stepmark.model_folder.hints import import_hint
from stepmark.tensor_files.global_tensor import GlobalTensor
from stepmark.tensor_files.source_files import read_json

KIND = "stepmark"
RUN = "run"
_OPTIMIZERS = ("named", "optimizer")
_SCHEDULES = ("scheduler", "lr_scheduler", "schedule")
_SWITCHES = {"foreach": None, "fused": None, "capturable": False}  # how a step is computed, on this device


def find_checkpoint(source: Path) -> Path:
    """The checkpoint at a path, or the newest of a run.

    Raises CheckpointNotFound where there is none, and UsageError for another tool's.
    """
    try:
        return find_checkpoints(source)[0]
    except CheckpointNotFound:
        if hint := import_hint(source, "OUT"):
            raise UsageError(f"{source} is not a Stepmark checkpoint: {hint}") from None
        raise


def open_stepmark(folder: Path) -> ForeignCheckpoint:
    """What a checkpoint of ours holds; nothing of the tensors has been read.

    Raises CheckpointDamaged where a file is missing or corrupted, as far as headers and sizes show, and
    CheckpointMismatch where it has no model, or several optimizers.
    """
    manifest = read_manifest(folder)
    check_integrity(folder, manifest)
    group = model_group(folder, manifest)
    sections = read_values(folder, manifest)
    tensors = CheckpointTensors(folder, manifest)
    found = ForeignCheckpoint(KIND, folder, tensors.group(group), step=manifest.step, files=files_beside(folder))
    if group == ADAPTER:
        found.adapter, found.files[ADAPTER_CONFIG] = True, folder / ADAPTER_CONFIG
    found.mesh = dict(manifest.mesh)
    model = sections.get(MODEL) or {}
    found.tied = dict(model.get("tied") or {})
    found.architecture = model.get("class")
    found.optimizer = _optimizer(folder, manifest, sections, tensors)
    found.schedule = _schedule(manifest, sections, found, tensors)
    found.lost += _left_out(manifest, sections, found)
    if (folder / TRAINER_STATE).is_file():
        found.trainer_state = read_json(folder / TRAINER_STATE)
    found.records += tensors.records
    return found


def _optimizer(
    folder: Path, manifest: Manifest, sections: Mapping[str, Any], tensors: CheckpointTensors
) -> ForeignOptimizer | None:
    """The optimizer by parameter names; None where there is none."""
    names = [name for name, kind in manifest.sections.items() if kind in _OPTIMIZERS]
    if not names:
        return None
    if len(names) > 1:
        raise CheckpointMismatch(
            f"{folder} has {len(names)} optimizers, {' and '.join(names)}; only one can be exported"
        )
    values = sections.get(names[0]) or {}
    stored = tensors.group(f"{OPTIMIZER}/{names[0]}")
    with well_formed(f"{folder}: its optimizer's values are"):
        groups, members = _groups(values, stored)
    states: dict[str, dict[str, Any]] = {}
    for full_name, tensor in stored.items():
        parameter, _, key = full_name.rpartition("/")
        if parameter in members:
            states.setdefault(parameter, {})[key] = tensor
    for parameter, state in (values.get("state") or {}).items():
        states.setdefault(parameter, {}).update({key: decode_plain(value) for key, value in state.items()})
    return ForeignOptimizer(groups, states)


def _number(stored: Mapping[str, GlobalTensor], name: str) -> int | float:
    return scalar(stored[name].pieces[0].array, name)


def _groups(values: Mapping[str, Any], stored: Mapping[str, GlobalTensor]) -> tuple[list[dict[str, Any]], set[str]]:
    """The groups with names in "params", and all names."""
    members: dict[str, int] = values["members"]
    groups = []
    for key in sorted(values["groups"], key=int):
        group = {name: decode(value, partial(_number, stored)) for name, value in values["groups"][key].items()}
        group |= {name: value for name, value in _SWITCHES.items() if name in group}
        group["params"] = [name for name, index in members.items() if index == int(key)]
        groups.append(group)
    return groups, set(members)


def _schedule(
    manifest: Manifest, sections: Mapping[str, Any], found: ForeignCheckpoint, tensors: CheckpointTensors
) -> dict[str, Any] | None:
    """A schedule's state dict as torch has it: a run's, or that of a custom loop's section; None without one."""
    run = (sections.get(RUN) or {}).get("value") if manifest.sections.get(RUN) == "object" else None
    if isinstance(run, dict) and found.optimizer is not None and "schedule" in run:
        known = {key: decode_plain(run[key]) for key in ("schedule", "rates") if key in run}
        return _lambda_schedule(found.optimizer.groups, known["schedule"], known.get("rates"))
    for name in _SCHEDULES:
        value = (sections.get(name) or {}).get("value")
        if isinstance(value, dict) and "last_epoch" in value:
            return dict(decode(value, partial(_number, tensors.group(f"{STATE}/{name}"))))
    return None


def _lambda_schedule(groups: list[dict[str, Any]], state: dict[str, Any], rates: Any) -> dict[str, Any]:
    """A schedule that is a function of the step, of which only the step is saved, as LambdaLR has it."""
    if set(state) != {"step"}:
        return dict(state)
    return {
        "base_lrs": [group.get("initial_lr", group.get("lr")) for group in groups],
        "last_epoch": state["step"],
        "_step_count": state["step"] + 1,
        "_is_initial": False,
        "_get_lr_called_within_step": False,
        "_last_lr": list(rates or [group.get("lr") for group in groups]),
        "lr_lambdas": [{} for _ in groups],
    }


def _left_out(manifest: Manifest, sections: Mapping[str, Any], source: ForeignCheckpoint) -> list[str]:
    """What no format takes, in sentences."""
    found = []
    extra = (sections.get(MODEL) or {}).get("extra")
    if extra:
        found.append(f"extra state of the model: {', '.join(sorted(extra))[:200]}")
    taken = {MODEL, RUN, *(_SCHEDULES if source.schedule is not None else ())}
    others = [name for name, kind in manifest.sections.items() if name not in taken and kind not in _OPTIMIZERS]
    if others:
        found.append(f"sections {', '.join(sorted(others))[:200]}: no place for them is known there")
    for name, kind in manifest.sections.items():
        values = sections.get(name) or {}
        if kind in _OPTIMIZERS and (values.get("keys") or values.get("own")):
            found.append("state of the optimizer that is of no parameter")
    return found
