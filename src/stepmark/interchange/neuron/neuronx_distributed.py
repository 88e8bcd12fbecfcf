"""Checkpoints of neuronx-distributed: tags of `nxd.save_checkpoint`, and the folders of `parallel_layers.save` before.

A tag has `model/` and `optim/` with a file for each rank; `done` proves nothing, only the files do.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepmark.errors import CheckpointDamaged, CheckpointMismatch
from stepmark.interchange.neuron import lora as neuron_lora
from stepmark.interchange.neuron.experts import LOST_STORE, add_expert_optimizer, is_expert, joined_experts
from stepmark.interchange.neuron.optimizer import add_optimizer, add_stored_optimizers
from stepmark.interchange.neuron.rank_files import (
    FIRST_LAYOUT,
    FIRST_OPTIMIZERS,
    RankCoordinates,
    check_grid,
    rank_files,
)
from stepmark.interchange.neuron.stages import Stage, fill_from_masters, head_layout, model_of, optimizer_of
from stepmark.interchange.sources.complete_state import files_beside, finish, outline_for
from stepmark.interchange.sources.dcp_store import is_store
from stepmark.interchange.sources.foreign import ForeignCheckpoint, ImportOptions
from stepmark.tensor_files.global_tensor import GlobalTensor, StoredArray
from stepmark.tensor_files.torch_file import Missing, read_dict, read_rank_file

_NUMBER = re.compile(r"(\d+)\D*\Z")
_STEPS = ("global_step", "total_steps", "step")


def recognize(folder: Path) -> bool:
    """Whether the folder is a tag, has tags, or is of the first layout."""
    return _is_tag(folder) or bool(_tags(folder)) or bool(rank_files(folder, FIRST_LAYOUT))


def _is_tag(folder: Path) -> bool:
    return bool(rank_files(folder / "model"))


def _tags(folder: Path) -> list[Path]:
    """The tags in a folder, the newest first: by the number in their names, or else by the time of `done`."""
    found = [path for path in folder.iterdir() if path.is_dir() and _is_tag(path)] if folder.is_dir() else []
    numbers = {path: match for path in found if (match := _NUMBER.search(path.name))}
    if len(numbers) == len(found):
        return sorted(found, key=lambda path: int(numbers[path][1]), reverse=True)
    done = {path: path / "done" for path in found}
    return sorted(found, key=lambda path: done[path].stat().st_mtime if done[path].exists() else 0.0, reverse=True)


def open_checkpoint(folder: Path, options: ImportOptions) -> ForeignCheckpoint:
    """What the tag holds, or the newest one in the folder."""
    first_layout = not _is_tag(folder) and not _tags(folder)
    tag = folder if _is_tag(folder) or first_layout else _tags(folder)[0]
    found = ForeignCheckpoint("neuronx-distributed", tag, {}, files=files_beside(folder))
    if tag != folder and len(_tags(folder)) > 1:
        found.assumed.append(f"{tag.name} is the newest of the tags; name another with --tag")
    models = rank_files(tag, FIRST_LAYOUT) if first_layout else rank_files(tag / "model")
    contents = read_models(models, found)
    _read_extras(tag, found, contents, first_layout)
    stages = stages_of(models, contents, found)
    optimizers = rank_files(tag, FIRST_OPTIMIZERS) if first_layout else rank_files(tag / "optim")
    lora = neuron_lora.config_of(tag, next(iter(contents.values())))
    weights_alone = options.model_only and not any(stage.lacks_weights for stage in stages)
    if weights_alone or not (optimizers or is_store(tag / "optim")):
        found.lost += [] if options.model_only else ["optimizer: the checkpoint has none"]
    elif is_store(tag / "optim") and found.mesh["ep"] > 1:
        found.lost.append(LOST_STORE)
    elif is_store(tag / "optim"):
        add_stored_optimizers(stages, tag / "optim", found)
    else:
        add_optimizers(stages, optimizers, found, tag)
    for stage in stages:
        fill_from_masters(stage)
    outline = outline_for(found.files, options, sum(len(stage.tensors) for stage in stages)) if not lora else None
    heads = head_layout(stages, neuron_lora.heads_config(options, found), tag, options.heads)
    if lora is not None:
        return neuron_lora.finish_adapter(found, stages, heads, lora, options)
    found.model, found.optimizer = model_of(stages, heads), optimizer_of(stages, heads)
    return finish(found, options, outline)


def read_models(files: dict[RankCoordinates, Path], found: ForeignCheckpoint) -> dict[RankCoordinates, dict[str, Any]]:
    """The state dicts of all ranks. Raises CheckpointDamaged where one is missing."""
    found.mesh = {axis: size for axis, size in check_grid(files, found.folder).items() if axis != "dp"}
    contents = {}
    for place, path in files.items():
        other = files[RankCoordinates(place.pp, place.tp, place.dp, 0)] if place.ep else None
        value = read_rank_file(path, found.records, other)
        if not isinstance(value, dict):
            raise CheckpointMismatch(f"{path} holds no state dict")
        contents[place] = value
    return contents


def _read_extras(
    tag: Path, found: ForeignCheckpoint, contents: dict[RankCoordinates, dict[str, Any]], first_layout: bool
) -> None:
    """The step and the schedule; in the first layout, the model lies inside each file."""
    user = read_dict(tag / "user_content.pt")
    found.schedule = read_dict(tag / "scheduler.pt")
    for place, value in list(contents.items()) if first_layout else []:
        if isinstance(value.get("model"), dict):
            contents[place] = value["model"]
            user = user or {key: item for key, item in value.items() if key != "model"}
            found.schedule = found.schedule or (
                value["scheduler"] if isinstance(value.get("scheduler"), dict) else None
            )
    found.step = next((user[key] for key in _STEPS if user and type(user.get(key)) is int), None)
    if user and not first_layout:
        found.lost.append(f"user_content.pt: {', '.join(sorted(map(str, user)))[:200]}, apart from the step")


def stages_of(
    files: dict[RankCoordinates, Path], contents: dict[RankCoordinates, dict[str, Any]], found: ForeignCheckpoint
) -> list[Stage]:
    """The stages, each with the tensors of its ranks. Raises CheckpointDamaged where ranks have different names."""
    stages = []
    for pp in range(found.mesh["pp"]):
        ranks = [_rank_tensors(files, contents, pp, tp, found.mesh["ep"]) for tp in range(found.mesh["tp"])]
        for tp, rank in enumerate(ranks):
            other = next((name for name in {*rank} ^ {*ranks[0]}), None)
            if other is not None:
                path = files[RankCoordinates(pp, tp)]
                raise CheckpointDamaged(f"{path}: tensor {other!r} is not on every tensor parallel rank")
        stages.append(Stage({name: [rank[name] for rank in ranks] for name in ranks[0]}))
    return stages


def _rank_tensors(
    files: dict[RankCoordinates, Path], contents: dict[RankCoordinates, dict[str, Any]], pp: int, tp: int, experts: int
) -> dict[str, GlobalTensor | Missing]:
    """A rank's tensors, those of all expert parallel ranks together."""
    found: dict[str, GlobalTensor | Missing] = {}
    places = [RankCoordinates(pp, tp, 0, ep) for ep in range(experts)]
    for name in contents[places[0]]:
        if name == neuron_lora.IN_STATE:
            continue
        values = {place: contents[place].get(name) for place in places}
        missing = next((item for item in values.values() if isinstance(item, Missing)), None)
        other = next((place for place, item in values.items() if not isinstance(item, StoredArray)), None)
        if missing is not None:
            found[name] = missing
        elif other is not None:
            kind = CheckpointDamaged if values[other] is None else CheckpointMismatch
            raise kind(f"{files[other]}: {name!r} is a {type(values[other]).__name__}, not a tensor")
        else:
            found[name] = _experts(name, list(values.values()), [files[place] for place in places])
    return found


def _experts(name: str, arrays: list[Any], paths: list[Path]) -> GlobalTensor:
    """Experts follow each other along dim 0; anything else is on every expert parallel rank.

    Raises CheckpointDamaged where a rank does not have its own: reading the first one's file instead is right for what
    all ranks have.
    """
    tensors = [GlobalTensor.whole(name, array) for array in arrays]
    first = tensors[0]
    if len(tensors) == 1:
        return first
    if not is_expert(first):
        replicas = [piece for tensor in tensors[1:] for piece in tensor.pieces]
        return GlobalTensor(name, first.dtype, first.shape, first.pieces, tuple(replicas))
    files = [tensor.pieces[0].array.path for tensor in tensors]
    borrowed = next((path for path, file in zip(paths[1:], files[1:], strict=True) if file == files[0]), None)
    if borrowed is not None:
        raise CheckpointDamaged(f"{borrowed}: the file of its part of tensor {name!r} is missing")
    return joined_experts(name, tensors)


def add_optimizers(
    stages: list[Stage], files: dict[RankCoordinates, Path], found: ForeignCheckpoint, tag: Path
) -> None:
    experts = found.mesh["ep"]
    if experts == 1 and any(place.ep for place in files):
        raise CheckpointDamaged(f"{tag}: the optimizer is of several expert parallel ranks, and the model of one")
    sizes = check_grid({replace(place, ep=0): path for place, path in files.items()}, tag / "optim")
    if (sizes["tp"], sizes["pp"]) != (found.mesh["tp"], found.mesh["pp"]):
        raise CheckpointDamaged(
            f"{tag}: the optimizer is of tp {sizes['tp']}, pp {sizes['pp']}, and the model of tp {found.mesh['tp']}, "
            f"pp {found.mesh['pp']}"
        )
    rules = []
    for pp, stage in enumerate(stages):
        own = {place: path for place, path in files.items() if place.pp == pp}
        if experts == 1:
            rules.append(add_optimizer(stage, own, found.records, found.lost))
        elif (rule := add_expert_optimizer(stage, own, experts, found.records, found.lost)) is not None:
            rules.append(rule)
        else:
            return
    found.mesh["dp"] = sizes["dp"]
    found.assumed.append(f"the optimizer numbers its parameters; their names follow from the model files ({rules[-1]})")
