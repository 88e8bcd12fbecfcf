"""DeepSpeed's ZeRO checkpoints: folders `global_stepN`, with a file `latest` beside them.

`param_shapes` in the model's states names the parameters that are trained, in order. ZeRO-1 and 2 flatten those of a
group, and a rank's file says which elements of which parameter its part has. ZeRO-3 cuts every parameter into equal
parts, of which a rank flattens its own, in sub-groups. The ranks' files hold fp32 weights and states in these forms.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.dtypes import item_size
from stepmark.checkpoint.format.manifest import MASTER
from stepmark.errors import CheckpointDamaged, CheckpointMismatch
from stepmark.filesystem.files import read_file
from stepmark.interchange.sources import transformers_trainer
from stepmark.interchange.sources.complete_state import files_beside, finish, outline_for
from stepmark.interchange.sources.foreign import ForeignCheckpoint, ForeignOptimizer, ImportOptions
from stepmark.interchange.sources.torch_optimizer import STEP, as_tensor, named_shapes, shared_value, split_state_dict
from stepmark.model_folder.adapted_model import ADAPTER_CONFIG
from stepmark.sharding.layout import Shape, TensorSlice
from stepmark.tensor_files.global_tensor import GlobalTensor, Piece, StoredArray
from stepmark.tensor_files.pickle_reader import PickledObject
from stepmark.tensor_files.torch_file import read_dict, read_torch_file

LATEST = "latest"
_FILE = re.compile(r"(?:bf16_)?(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_(model|optim)_states\.pt\Z")
_PARALLEL = re.compile(r"(layer|expert)_\d+.*_states\.pt\Z|.*_expert_\d+.*_states\.pt\Z")
_KNOWN = re.compile(
    r"module|buffer_names|optimizer|(frozen_)?param_(shapes|fragments)|shared_params|lr_scheduler|ds_(config|version)|"
    r"(skipped|global)_(steps|samples)|[dm]p_world_size|checkpoint_parallel_dimensions|sparse_tensor_module_names"
)
_NAMES = {3: ("optimizer_state_dict", "fp32_flat_groups")}  # of states and weights, by stage
_SMALLER = ("base_optimizer_state", "single_partition_of_fp32_groups")


@dataclass(frozen=True)
class _Flat:
    """Parameters that are flattened together: each rank's arrays by state, and which parts of parameters they have, as
    name, first element in the array, first element in the parameter, and length."""

    shapes: Mapping[str, Shape]
    arrays: Sequence[Mapping[str, Any]]
    parts: Sequence[Sequence[tuple[str, int, int, int]]]


def recognize(folder: Path) -> bool:
    """Whether the folder has such files, or says which folder in it has."""
    step = _step_folder(folder)
    return step is not None and (not step.is_dir() or any(_FILE.match(path.name) for path in step.iterdir()))


def _step_folder(folder: Path) -> Path | None:
    if not folder.is_dir() or any(_FILE.match(path.name) for path in folder.iterdir()):
        return folder if folder.is_dir() else None
    latest = folder / LATEST
    name = read_file(latest, follow=True)[:256].decode(errors="replace").strip() if latest.is_file() else ""
    return folder / name if name and Path(name).name == name else None


def open_checkpoint(folder: Path, options: ImportOptions) -> ForeignCheckpoint:
    step = _step_folder(folder)
    assert step is not None
    root = folder.parent if step == folder and (folder.parent / LATEST).is_file() else folder
    found = ForeignCheckpoint("DeepSpeed", root, {}, files=files_beside(root))
    if (root / ADAPTER_CONFIG).is_file():
        raise CheckpointMismatch(f"{root}: DeepSpeed's states of an adapter of PEFT are not read; save it without ZeRO")
    models, optimizers = _read(step, found)
    first = models[0]
    transformers_trainer.read_trainer_state(found)
    found.step = first["global_steps"] if type(first.get("global_steps")) is int else found.step
    others = [str(key)[:80] for key, value in first.items() if not _KNOWN.fullmatch(str(key)) and value is not None]
    found.lost += [f"{', '.join(others)}: other values of the file"] if others else []
    found.lost += transformers_trainer.left_behind(root)
    own = first.get("lr_scheduler")
    if isinstance(own, dict) and "last_epoch" not in own:
        found.lost.append(f"lr_scheduler: DeepSpeed's own, at {own.get('last_batch_iteration')}; name a schedule")
    found.schedule = own if isinstance(own, dict) and "last_epoch" in own else read_dict(root / "scheduler.pt")
    units, groups = _units(first, optimizers, found, str(step))
    states = {name: state for unit in units for name, state in _states(unit, str(step)).items()}
    for group in groups:
        taken = group.pop(STEP, None)  # as FusedAdam counts
        for name in group["params"] if taken is not None else ():
            states[name].setdefault(STEP, taken)
    found.model = _model(models, states, options, str(step))
    found.optimizer = ForeignOptimizer(groups, states)
    return finish(found, options, outline_for(found.files, options, len(found.model)))


def _read(step: Path, found: ForeignCheckpoint) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The ranks' contents, of the model and of the optimizer. Raises CheckpointDamaged where a file is missing."""
    read: dict[str, dict[int, dict[str, Any]]] = {"module": {}, "optimizer_state_dict": {}}
    for path in sorted(step.iterdir()) if step.is_dir() else ():
        match = _FILE.match(path.name)
        if _PARALLEL.match(path.name) or (match and int(match[2])):
            raise CheckpointMismatch(
                f"{path} is of a model that DeepSpeed divided into stages, experts or tensor parallel ranks, which are "
                "not put together"
            )
        if match is not None:
            value, key = read_torch_file(path, found.records), [*read][match[3] == "optim"]
            if not isinstance(value, dict) or not isinstance(value.get(key), dict):
                raise CheckpointDamaged(f"{path} has no {key}, which DeepSpeed's file of that name has")
            read[key][int(match[1] or 0)] = value if key == "module" else value[key]
    models, optimizers = read.values()
    ranks = models.get(0, {}).get("dp_world_size", len(optimizers))
    if models and not optimizers and not models.get(0, {}).get("param_shapes"):
        raise CheckpointMismatch(f"{step} was saved without ZeRO: import its file mp_rank_00_model_states.pt itself")
    wanted = {"model": (models, ranks if len(models) > 1 else 1), "optim": (optimizers, ranks)}
    for kind, (files, count) in wanted.items():
        if sorted(files) != [*range(count)]:
            missing = next((rank for rank in range(count) if rank not in files), "?")
            raise CheckpointDamaged(
                f"{step} has {len(files)} files of {kind}_states of {count}: rank {missing} is missing"
            )
    found.mesh = {"dp": ranks}
    return [models[rank] for rank in sorted(models)], [optimizers[rank] for rank in sorted(optimizers)]


def _units(
    first: Mapping[str, Any], ranks: list[dict[str, Any]], found: ForeignCheckpoint, where: str
) -> tuple[list[_Flat], list[dict[str, Any]]]:
    """What is flattened together, and the optimizer's groups with names."""
    stage: set[Any] = {getattr(one.get("zero_stage"), "args", (one.get("zero_stage"),))[0] for one in ranks}
    if len(stage) != 1 or not stage <= {1, 2, 3}:
        raise CheckpointMismatch(f"{where}: its zero_stage is {stage}, which is not read")
    found.kind += f" ZeRO-{(number := stage.pop())}"
    inner, weights = _NAMES.get(number, _SMALLER)
    if any(isinstance(one.get(inner), list) for one in ranks):
        raise CheckpointMismatch(f"{where} has no learning rates or decays (elastic_checkpoint); use zero_to_fp32.py")
    states, listed = zip(*(split_state_dict(one.get(inner), where) for one in ranks), strict=True)
    groups: list[dict[str, Any]] = listed[0]
    numbers = [each for group in groups for each in group["params"]]
    shapes = [named_shapes(one, where) for one in first.get("param_shapes") or ()]
    flat: list[Any] = [one.get(weights) for one in ranks]
    if any(not isinstance(one, list) or len(one) != len(numbers) for one in flat):
        raise CheckpointDamaged(f"{where}: the groups of fp32 weights are not those of the optimizer")
    arrays = [
        [{**state.get(n, {}), MASTER: one[at]} for state, one in zip(states, flat, strict=True)]
        for at, n in enumerate(numbers)
    ]
    if number == 3:
        left = [item for one in shapes for item in one.items()]
        units = [_equal_parts(left, one, where) for one in arrays]
    else:
        left = []
        mappings = [[one.get("param_slice_mappings") or () for one in ranks]] * len(shapes)
        units = [_mapped(*one, at, where) for at, one in enumerate(zip(shapes, arrays, mappings, strict=False))]
    if left or sum(map(len, shapes)) != len(names := {name for unit in units for name in unit.shapes}):
        raise CheckpointDamaged(f"{where}: the weights of {len(names)} of the parameters in param_shapes are there")
    members = dict(zip(numbers, units, strict=True))
    return units, [{**one, "params": [name for n in one["params"] for name in members[n].shapes]} for one in groups]


def _length(array: Any, where: str) -> int:
    if not isinstance(array, StoredArray) or len(array.shape) != 1 or array.strides != (1,):
        raise CheckpointDamaged(f"{where}: a rank's flattened values are not in one dim")
    return array.shape[0]


def _equal_parts(left: list[tuple[str, Shape]], arrays: list[dict[str, Any]], where: str) -> _Flat:
    """A sub-group of ZeRO-3: as many of the parameters that are left as fill a rank's array."""
    size, shapes, at = _length(arrays[0][MASTER], where), {}, 0
    parts: list[list[tuple[str, int, int, int]]] = [[] for _ in arrays]
    while left and at < size:
        name, shape = left.pop(0)
        length = -(-math.prod(shape) // len(arrays))
        for rank, own in enumerate(parts):
            begin = min(rank * length, math.prod(shape))
            own.append((name, at, begin, min(length, math.prod(shape) - begin)))
        shapes[name], at = shape, at + length
    if any(_length(one[MASTER], where) != at for one in arrays):
        raise CheckpointDamaged(f"{where}: the fp32 weights do not fit param_shapes; the files are of several saves")
    return _Flat(shapes, arrays, parts)


def _mapped(
    shapes: Mapping[str, Shape], arrays: list[dict[str, Any]], mappings: Sequence[Any], group: int, where: str
) -> _Flat:
    """A group of ZeRO-1 or 2, whose ranks say which parts they have."""
    done = dict.fromkeys(shapes, 0)
    parts: list[list[tuple[str, int, int, int]]] = []
    for one, mapping in zip(arrays, mappings, strict=True):
        if len(mapping) <= group or not isinstance(mapping[group], dict):
            raise CheckpointMismatch(
                f"{where} has no param_slice_mappings, as before DeepSpeed 0.8; save it with a later one"
            )
        parts.append([])
        for name, place in mapping[group].items():
            said = place.attributes if isinstance(place, PickledObject) else {}
            start, length = (found if type(found := said.get(key)) is int else -1 for key in ("start", "numel"))
            if name not in done or min(start, length) < 0 or start + length > _length(one[MASTER], where):
                raise CheckpointDamaged(f"{where}: a rank says that it has a part of {name!r}, and has not")
            parts[-1].append((name, start, done[name], length))
            done[name] += length
    short = next((name for name, shape in shapes.items() if done[name] != math.prod(shape)), None)
    if short is not None:
        raise CheckpointDamaged(f"{where}: {done[short]} elements of {short!r} are there, of {list(shapes[short])}")
    return _Flat(shapes, arrays, parts)


def _states(unit: _Flat, where: str) -> dict[str, dict[str, Any]]:
    """The states of a unit's parameters by name."""
    found: dict[str, dict[str, Any]] = {name: {} for name in unit.shapes}
    for key in {key: None for one in unit.arrays for key in one}:
        values: list[Any] = [one.get(key) for one in unit.arrays]
        if not any(isinstance(value, StoredArray) and value.shape for value in values):
            shared = shared_value([as_tensor(str(key), value) for value in values], f"{where}: the optimizer's {key}")
            for state in found.values():
                state[str(key)] = shared
            continue
        pieces: dict[str, list[Piece]] = {name: [] for name in unit.shapes}
        for value, one, parts in zip(values, unit.arrays, unit.parts, strict=True):
            padding = _length(value, where) - _length(one[MASTER], where)  # of the last ranks
            if not 0 <= padding < 2 * len(values):
                raise CheckpointDamaged(f"{where}: a rank's {key} is not as long as its weights")
            for name, start, begin, length in parts:
                pieces[name] += _pieces(value, start, unit.shapes[name], begin, length)
        for name, shape in unit.shapes.items():
            found[name][str(key)] = GlobalTensor(f"{name}/{key}", values[0].dtype, shape, tuple(pieces[name]))
    return found


def _pieces(array: Any, start: int, shape: Shape, begin: int, length: int) -> list[Piece]:
    """Elements [begin, begin + length) of a flattened tensor, which are in an array of one dim from `start` on."""
    first, size = array.offset + start * item_size(array.dtype), item_size(array.dtype)
    return [
        Piece(StoredArray.contiguous(array.path, first + at * size, array.dtype, box.lengths), box.offsets)
        for box, at in TensorSlice.of_range(shape, begin, begin + length).blocks()
    ]


def _model(
    models: Sequence[dict[str, Any]], states: Mapping[str, dict[str, Any]], options: ImportOptions, where: str
) -> dict[str, GlobalTensor]:
    """The model's tensors: of what is trained the fp32 weights, rounded where the module is bf16."""
    first, fragments = models[0], [one.get("frozen_param_fragments") or {} for one in models]
    frozen, shared = named_shapes(first.get("frozen_param_shapes") or {}, where), first.get("shared_params") or {}
    model: dict[str, GlobalTensor] = {}
    for name, item in first["module"].items():
        source = shared.get(name, name)
        if source in states:
            dtype = "BF16" if getattr(item, "dtype", "") == "BF16" and not options.model_only else "F32"
            model[name] = replace(states[source][MASTER], name=name, dtype=dtype, rounds=True)
        elif source in frozen and getattr(item, "shape", None) != frozen[source]:  # of ZeRO-3, cut like the others
            arrays = [{MASTER: one.get(source)} for one in fragments]
            model[name] = _states(_equal_parts([(source, frozen[source])], arrays, where), where)[source][MASTER]
        elif isinstance(item, StoredArray):
            model[name] = GlobalTensor.whole(name, item)
    empty = (name for name, tensor in model.items() if 0 in tensor.shape)  # ZeRO-3's, of what is in no list of shapes
    missing = next((name for name in (*states, *empty) if name not in model or 0 in model[name].shape), None)
    if missing is not None:
        raise CheckpointDamaged(f"{where}: the values of the module's {missing!r} are not there")
    return model
