"""Checkpoint folders of transformers' Trainer, and what `accelerate` saves in the same way: DDP and FSDP2 forms.

Weights are in Hugging Face's files, or of FSDP in `pytorch_model_fsdp.bin` or the store `pytorch_model_fsdp_0`; the
optimizer in optimizer.pt or .bin, whose numbers get names from the model's config, or in the store `optimizer_0`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stepmark.errors import CheckpointMismatch
from stepmark.interchange.model_outline import CONFIG, ModelOutline
from stepmark.interchange.sources import dcp
from stepmark.interchange.sources.complete_state import files_beside, finish, fit_model, outline_for, steps_of
from stepmark.interchange.sources.dcp_store import is_store, read_store
from stepmark.interchange.sources.foreign import TRAINER_STATE, ForeignCheckpoint, ForeignOptimizer, ImportOptions
from stepmark.interchange.sources.optimizer_names import agreed_names, own_names
from stepmark.interchange.sources.peft_adapter import adapter_file, adapter_outline
from stepmark.interchange.sources.state_dict_files import read_files, read_weights, without_prefix
from stepmark.interchange.sources.torch_optimizer import split_state_dict, state_shapes, whole_optimizer
from stepmark.model_folder.adapted_model import ADAPTER_CONFIG
from stepmark.model_folder.model_files import has_weights
from stepmark.tensor_files.global_tensor import GlobalTensor
from stepmark.tensor_files.source_files import read_json
from stepmark.tensor_files.torch_file import read_dict, read_saved

TRAINER = "transformers Trainer"
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
_SCHEDULERS = ("scheduler.pt", "scheduler.bin")
_FSDP_MODELS = ("pytorch_model_fsdp.bin", "pytorch_model_fsdp_0")
_FSDP_PARTS = "pytorch_model_fsdp*_rank*.bin"
_FSDP_OPTIMIZER = "optimizer_0"
_LEFT_BEHIND = {  # by what is said of files
    "random numbers: Stepmark draws them from the seed and the step, not from a saved generator": (
        "rng_state*.pth",
        "random_states_*.pkl",
    ),
    "training_args.bin: it is a pickle of the tool's own classes; give the arguments again": ("training_args.bin",),
    "scaler.pt: the loss scale; a run with fp16 begins with its own": ("scaler.pt", "scaler.bin"),
    "custom_checkpoint_*.pkl: objects of the saving program": ("custom_checkpoint_*.pkl",),
}


def recognize(folder: Path) -> bool:
    """Whether the folder has the files of a Trainer's checkpoint, or of accelerate's save_state."""
    weights = has_weights(folder) or any((folder / name).exists() for name in _FSDP_MODELS) or adapter_file(folder)
    beside = (TRAINER_STATE, *_OPTIMIZERS, _FSDP_OPTIMIZER, "random_states_0.pkl")
    return bool(weights or any(folder.glob(_FSDP_PARTS))) and any((folder / name).exists() for name in beside)


def open_checkpoint(folder: Path, options: ImportOptions) -> ForeignCheckpoint:
    tool = TRAINER if (folder / TRAINER_STATE).is_file() else "accelerate"
    kind = f"{tool} with FSDP" if any((folder / name).exists() for name in _FSDP_MODELS) else tool
    found = ForeignCheckpoint(kind, folder, {}, files=files_beside(folder))
    found.model = _weights(folder, found)
    read_trainer_state(found)
    if found.adapter:
        found.files = {ADAPTER_CONFIG: folder / ADAPTER_CONFIG} | {k: v for k, v in found.files.items() if k != CONFIG}
        outline = None if options.model_only else adapter_outline(folder, options.config, len(found.model))
    else:
        outline = outline_for(found.files, options, len(found.model))
        found.files |= {CONFIG: options.config} if options.config is not None else {}
    if outline is not None:
        fit_model(found, outline)  # before the optimizer, whose message would say less
    if not options.model_only:
        found.optimizer = _optimizer(folder, found, outline)
        saved = next(filter(None, (read_dict(folder / name) for name in _SCHEDULERS)), None)
        found.schedule = _schedule_of_step(found, saved)
    found.lost += left_behind(folder)
    return finish(found, options, outline)


def _weights(folder: Path, found: ForeignCheckpoint) -> dict[str, GlobalTensor]:
    whole, sharded = (folder / name for name in _FSDP_MODELS)
    for part in sorted(folder.glob(_FSDP_PARTS)):
        raise CheckpointMismatch(
            f"{part}: it is one rank's part of the model, and does not say which; load it with accelerate on as many "
            "ranks, and save with SHARDED_STATE_DICT and use_dcp=True"
        )
    if whole.is_file():
        return without_prefix(read_files([whole], found.records))
    if is_store(sharded):
        store = read_store(sharded)
        found.records += store.records
        return dcp.model_of(store, None, found.lost, {})
    adapter = adapter_file(folder)
    if adapter is not None and not has_weights(folder):
        found.adapter, found.kind = True, f"{found.kind} with PEFT"
        others = sorted(path.parent.name for path in folder.glob(f"*/{ADAPTER_CONFIG}"))
        found.lost += [f"{name}: another adapter; only the folder's own is taken" for name in others]
        return read_files([adapter], found.records)
    if (folder / "model_1.safetensors").exists():
        found.lost.append(
            "model_1.safetensors and later ones: accelerate saved several models; only the first is taken"
        )
    return without_prefix(read_weights(folder, found.records))


def read_trainer_state(found: ForeignCheckpoint) -> None:
    """Takes the step and the rest of trainer_state.json, if there is one. Raises CheckpointMismatch."""
    path = found.folder / TRAINER_STATE
    if not path.is_file():
        return
    state = read_json(path)
    step = state.get("global_step")
    if isinstance(step, float) and step.is_integer():
        step = int(step)
    if type(step) is not int or not 0 <= step < 1 << 53:
        raise CheckpointMismatch(f"{path}: its global_step is {str(step)[:40]}, not a step")
    found.step, found.trainer_state = step, state


def _optimizer(folder: Path, found: ForeignCheckpoint, outline: ModelOutline | None) -> ForeignOptimizer | None:
    store = folder / _FSDP_OPTIMIZER
    if is_store(store):
        opened = read_store(store)
        found.records += opened.records
        return dcp.optimizer_of(opened, found, outline)
    path = next((folder / name for name in _OPTIMIZERS if (folder / name).is_file()), None)
    if path is None:
        found.lost.append("optimizer: the folder has no optimizer.pt")
        return None
    state, groups = split_state_dict(read_saved(path, found.records), str(path))
    if (named := own_names(groups)) is not None:
        return whole_optimizer(state, groups, named, path)
    if outline is not None:
        _check_version(found, outline, path)
    tool = TRAINER if found.kind.startswith(TRAINER) else None
    names = agreed_names(found, groups, state_shapes(state), path, outline, None, tool=tool)
    return whole_optimizer(state, groups, names, path)


def _check_version(found: ForeignCheckpoint, outline: ModelOutline, path: Path) -> None:
    """Raises CheckpointMismatch where a class that got other names, and perhaps another order, has numbered."""
    said, here = str(outline.config.get("transformers_version")), version("transformers")
    if (outline.saved or outline.joined) and said != here:
        if said.split(".")[0] != here.split(".")[0]:
            raise CheckpointMismatch(
                f"{path} numbers the parameters of transformers {said}, whose {outline.architecture} is another than "
                f"that of {here}; import with that version installed, or the model alone with --model-only"
            )
        found.assumed.append(f"the order of parameters in transformers {said} is that in {here}")


def _schedule_of_step(found: ForeignCheckpoint, schedule: dict[str, Any] | None) -> Mapping[str, Any] | None:
    """The schedule by steps of the optimizer: accelerate advances it once for each process."""
    counted = steps_of(found.optimizer) if found.optimizer is not None else None
    step = found.step if found.step is not None else counted
    if schedule is None or step is None:
        return schedule
    last, ranks = schedule.get("last_epoch"), len(list(found.folder.glob("random_states_*.pkl")))
    if found.step is None and ranks > 1 and last == ranks * step and "lr_lambdas" in schedule:
        found.assumed.append(
            f"the schedule counts {last}, {ranks} for each step, since accelerate advances it on every rank"
        )
        return {**schedule, "last_epoch": step}
    if type(last) is int and last != step:
        found.assumed.append(f"the schedule is at {last}, and the optimizer at step {step}")
    return schedule


def left_behind(folder: Path) -> list[str]:
    """What is never taken along, as far as it is there."""
    return [reason for reason, patterns in _LEFT_BEHIND.items() if any(any(folder.glob(each)) for each in patterns)]
