"""Folders that transformers' Trainer resumes from: `trainer.train(resume_from_checkpoint="OUT")`."""

from __future__ import annotations

import json
import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from stepmark.checkpoint.format.manifest import MASTER
from stepmark.errors import CheckpointMismatch
from stepmark.interchange.model_outline import CONFIG, ModelOutline, outline_of
from stepmark.interchange.sinks.export_plan import ExportPlan, optimizer_of
from stepmark.interchange.sinks.imported_state import trainer_state_bytes
from stepmark.interchange.sources.complete_state import compare_model
from stepmark.interchange.sources.foreign import ForeignCheckpoint
from stepmark.interchange.sources.optimizer_names import NAMES
from stepmark.interchange.sources.peft_adapter import adapter_outline
from stepmark.model_folder.adapted_model import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from stepmark.model_folder.output_files import MAX_SHARD, DataFile, copied_files, model_files, tensor_file, torch_file
from stepmark.tensor_files.global_tensor import GlobalTensor, StoredArray
from stepmark.tensor_files.source_files import read_json

_MASTERS = (
    "the weights are written in fp32, from the master weights; load the model in fp32 (with bf16=True for autocast), "
    "since transformers keeps no master weights"
)

_CONTROL = ("should_epoch_stop", "should_evaluate", "should_log", "should_save", "should_training_stop")


def plan(source: ForeignCheckpoint, config_file: Path | None) -> ExportPlan:
    """The files of a `checkpoint-N` folder. `config_file`: the model's, where the checkpoint has none."""
    groups = len(optimizer_of(source).groups)
    outline = _outline(source, config_file)
    weights, masters = _weights_in_full_precision(source)
    files = [tensor_file(ADAPTER_WEIGHTS, weights)] if source.adapter else model_files(weights, MAX_SHARD)
    found = ExportPlan(files, notes=[_MASTERS] if masters else [])
    found.files += copied_files(source.files, without=(CONFIG,))
    if not source.adapter:
        config = read_json(source.files[CONFIG])
        config |= {key: "float32" for key in ("dtype", "torch_dtype") if masters and key in config}
        found.files.append(DataFile(CONFIG, (json.dumps(config, indent=2) + "\n").encode()))
    found.files.append(torch_file("optimizer.pt", numbered(source, outline)))
    if source.schedule is not None:
        found.files.append(torch_file("scheduler.pt", dict(source.schedule)))
    else:
        found.lost.append("scheduler.pt: the checkpoint has no schedule of a run; transformers begins its own anew")
    state = json.loads(trainer_state_bytes(source))  # transformers asks for that of its control when it saves next
    state["stateful_callbacks"]["TrainerControl"] = {"args": dict.fromkeys(_CONTROL, False), "attributes": {}}
    found.files.append(torch_file("rng_state.pth", _random_states(source)))
    found.files.append(DataFile("trainer_state.json", (json.dumps(state, indent=2, sort_keys=True) + "\n").encode()))
    if groups != 2:
        found.notes.append(
            f"the optimizer has {groups} group{'s' if groups > 1 else ''} of parameters, and Trainer makes two; give "
            "it your optimizer (optimizers=)"
        )
    return found


def _outline(source: ForeignCheckpoint, config: Path | None) -> ModelOutline:
    """The model of the checkpoint's config, compared with its tensors.

    Raises CheckpointMismatch where there is no config, or it is of another model.
    """
    if source.adapter:
        outline = adapter_outline(source.folder, config, len(source.model))
        compare_model(source, outline, source.folder / ADAPTER_CONFIG)
        optimizer_of(source).rename({live: name for name, live in outline.live.items()})  # to those of the tensors
        return outline
    path = config or source.files.get(CONFIG)
    if path is None:
        raise CheckpointMismatch(
            f"{source.folder} has no {CONFIG}, from which the order of the parameters follows, which this format "
            "numbers; give the model's with --config"
        )
    outline = outline_of(path, len(source.model))
    compare_model(source, outline, path)
    source.files[CONFIG] = path
    return outline


def _weights_in_full_precision(source: ForeignCheckpoint) -> tuple[dict[str, GlobalTensor], bool]:
    """The model, with fp32 master weights in place of what they were rounded to; and whether there are any."""
    states = source.optimizer.states if source.optimizer is not None else {}
    found = {name: states.get(name, {}).get(MASTER, tensor) for name, tensor in source.model.items()}
    replaced = any(found[name] is not tensor for name, tensor in source.model.items())
    return {name: replace(tensor, name=name) for name, tensor in found.items()}, replaced


def numbered(source: ForeignCheckpoint, outline: ModelOutline) -> dict[str, Any]:
    """The optimizer's state dict as torch has it: parameters are numbered group by group, in the order of the model, or
    that of groups that are not Trainer's two.

    Raises CheckpointMismatch for one that the model does not have.
    """
    optimizer, known = optimizer_of(source), {name: place for place, name in enumerate(outline.parameters)}
    own = any(group.get("weight_decay") for group in optimizer.groups[1:])
    groups: list[dict[str, Any]] = []
    state: dict[int, dict[str, Any]] = {}
    number = 0
    for group in optimizer.groups:
        other = next((name for name in group["params"] if name not in known), None)
        if other is not None:
            raise CheckpointMismatch(f"{source.folder}: the optimizer has {other!r}, no parameter of the model")
        names = group["params"] if own else sorted(group["params"], key=known.__getitem__)
        named = {NAMES: names} if len(optimizer.groups) == 1 else {}  # Trainer's own order is that of two groups
        groups.append({**group, **named, "params": list(range(number, number + len(names)))})
        for name in names:
            if name in optimizer.states:
                state[number] = {key: value for key, value in optimizer.states[name].items() if key != MASTER}
            number += 1
    return {"state": state, "param_groups": groups}


def _random_states(source: ForeignCheckpoint) -> dict[str, Any]:
    """States of generators, made from the step: Stepmark draws random numbers from seed and step and has none."""
    step = source.step or 0
    return {
        "python": random.Random(step).getstate(),
        "numpy": np.random.RandomState(step % (1 << 32)).get_state(),
        "cpu": _bytes_tensor(cpu_generator_state(step)),
        "cuda": _bytes_tensor(struct.pack("<2q", step, 0)),  # seed and position
        "xla": step,
    }


def _bytes_tensor(data: bytes) -> GlobalTensor:
    return GlobalTensor.whole("a generator's state", StoredArray(Path(), 0, "U8", (len(data),), (1,), data))


def cpu_generator_state(seed: int) -> bytes:
    """`torch.Generator().manual_seed(seed).get_state()`: the seed, that 1 number is left of a table of 624 that numpy
    makes in the same way, and no stored normal numbers."""
    state: Any = np.random.RandomState(seed % (1 << 32)).get_state()
    return struct.pack("<QiiQ", seed, 1, 1, 0) + bytes(state[1].astype("<u8").tobytes()) + bytes(40)
