"""The state dict of a torch optimizer, with numbers or names, as a ForeignOptimizer."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.read_errors import well_formed
from stepmark.errors import CheckpointDamaged, CheckpointMismatch
from stepmark.interchange.sources.foreign import ForeignOptimizer
from stepmark.interchange.sources.optimizer_names import NAMES
from stepmark.sharding.layout import Shape
from stepmark.tensor_files.array_reader import ArrayReader
from stepmark.tensor_files.conversion import number
from stepmark.tensor_files.global_tensor import GlobalTensor, StoredArray
from stepmark.tensor_files.pickle_reader import natural

STEP = "step"
_FACTORS = (("exp_avg_sq_row", "exp_avg_sq_col"), ("row_var", "col_var"))  # of transformers; of torch, of size 1 there


def split_state_dict(value: Any, where: str) -> tuple[dict[Any, dict[str, Any]], list[dict[str, Any]]]:
    """State and groups of an optimizer's state dict. Raises CheckpointDamaged where it is not one."""
    state = value.get("state") if isinstance(value, dict) else None
    groups = value.get("param_groups") if isinstance(value, dict) else None
    if not isinstance(state, dict) or not isinstance(groups, list) or not groups:
        raise CheckpointDamaged(f"{where} is not the state of an optimizer: it has no state and param_groups")
    if not all(isinstance(item, dict) for item in state.values()):
        raise CheckpointDamaged(f"{where}: a state of the optimizer is malformed")
    return state, group_settings(groups, where)


def shapes_of(value: Any, where: str) -> dict[Any, Shape]:
    """Shapes of parameters, by number or name. Raises CheckpointDamaged where they are malformed."""
    with well_formed(f"{where}: its shapes of parameters are"):
        return {key: natural(shape) for key, shape in value.items()}


def named_shapes(value: Any, where: str) -> dict[str, Shape]:
    """The same by name, whatever a damaged file has in place of names."""
    return {str(name): shape for name, shape in shapes_of(value, where).items()}


def group_settings(groups: Sequence[Any], where: str) -> list[dict[str, Any]]:
    """The groups of an optimizer's state dict, as plain values. Raises CheckpointDamaged where one is malformed."""
    if not all(isinstance(group, dict) for group in groups):
        raise CheckpointDamaged(f"{where}: a group of the optimizer is malformed")
    return [{str(key): to_python(item, where) for key, item in group.items()} for group in groups]


def to_python(value: Any, where: str) -> Any:
    """A hyperparameter as plain values: tensors of one element become numbers."""
    if isinstance(value, StoredArray):
        return scalar(value, where)
    if isinstance(value, dict):
        return {key: to_python(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_python(item, where) for item in value]
    if isinstance(value, GlobalTensor):
        return scalar(value.pieces[0].array, where)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointMismatch(f"{where}: a hyperparameter of the optimizer is a {type(value).__name__}")


def scalar(array: StoredArray, where: str) -> int | float:
    """The number in a tensor of one element."""
    if array.numel != 1:
        raise CheckpointMismatch(f"{where}: a tensor of shape {list(array.shape)} stands where a number is expected")
    bits = ArrayReader().array(array)
    found = number(bits.tobytes(), array.dtype)
    if found is None:
        raise CheckpointMismatch(f"{where}: a tensor of type {array.dtype} stands where a number is expected")
    return found


def number_tensor(name: str, value: float, path: Path) -> GlobalTensor:
    """A tensor for a number, such as a step that a tool counts with an integer."""
    array = StoredArray(path, 0, "F32", (), (), struct.pack("<f", value))
    return GlobalTensor.whole(name, array)


def factored_shape(state: Mapping[str, Any]) -> Shape | None:
    """The shape of a parameter of an Adafactor, which keeps sums over its rows and columns; None of any other."""
    for names in _FACTORS:
        rows, columns = (array_shape(state.get(name)) for name in names)
        if rows and columns:
            return (*(rows if names is _FACTORS[0] else rows[:-1]), columns[-1])
    return None


def state_shape(state: Mapping[str, Any]) -> Shape | None:
    """The shape of a parameter, as its states show it; None where they do not."""
    shapes = (array_shape(value) for key, value in state.items() if key != STEP)
    return factored_shape(state) or next((shape for shape in shapes if shape), None)


def state_shapes(states: Mapping[Any, Mapping[str, Any]]) -> dict[Any, Shape]:
    """The shapes that the states of parameters show, by their keys."""
    return {key: shape for key, state in states.items() if (shape := state_shape(state))}


def array_shape(value: Any) -> Shape | None:
    """The shape of an array or tensor, None of anything else."""
    return value.shape if isinstance(value, StoredArray | GlobalTensor) else None


def whole_optimizer(
    state: Mapping[Any, Mapping[str, Any]], groups: list[dict[str, Any]], names: Mapping[Any, str], where: Path
) -> ForeignOptimizer:
    """An optimizer whose states are not sharded. `names` are by the keys of `state`."""
    states: dict[str, dict[str, Any]] = {}
    for key, values in state.items():
        if key not in names:
            raise CheckpointDamaged(f"{where}: the state of parameter {str(key)[:80]!r} is in no group")
        states[names[key]] = {str(one): as_tensor(f"{names[key]}/{one}", value) for one, value in values.items()}
    name_groups(groups, names)
    return ForeignOptimizer(groups, states)


def name_groups(groups: list[dict[str, Any]], names: Mapping[Any, str]) -> None:
    """Puts names in place of numbers, or of other names, into the "params" of groups."""
    for group in groups:
        group["params"] = [names[key] for key in group["params"]]
        group.pop(NAMES, None)


def as_tensor(name: str, value: Any) -> Any:
    """A state's value: arrays become tensors."""
    return GlobalTensor.whole(name, value) if isinstance(value, StoredArray) else value


def shared_value(values: Sequence[Any], where: str) -> Any:
    """What every rank has in full, such as a step; a tensor's replicas are compared when it is written.

    Raises CheckpointDamaged where the ranks have different values: their files are of several saves.
    """
    first = values[0]
    if all(isinstance(value, GlobalTensor) for value in values):
        replicas = [piece for value in values[1:] if value is not first for piece in (*value.pieces, *value.replicas)]
        return replace(first, replicas=(*first.replicas, *replicas))
    if any(isinstance(value, GlobalTensor) or value != first for value in values):
        raise CheckpointDamaged(f"{where} differs from rank to rank; the files are of several saves")
    return first
