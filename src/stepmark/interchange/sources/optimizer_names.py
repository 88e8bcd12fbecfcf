"""Names for the parameters of optimizers that number them.

An optimizer that was given names keeps them as `param_names`. Otherwise a number is a position: all groups in order,
within a group the order of the model's parameters. Which parameters a group has is then not stored, so the rules that
the tools use are tried, and one is taken if the sizes of the groups and the shape of every state fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stepmark.errors import CheckpointMismatch
from stepmark.interchange.model_outline import CONFIG, ModelOutline
from stepmark.interchange.sources.foreign import ForeignCheckpoint
from stepmark.interchange.sources.state_dict_files import clean_name
from stepmark.sharding.layout import Shape

NAMES = "param_names"
FILE_ORDER = "the file's order of names"
NONE_RENAMED: Mapping[str, str] = MappingProxyType({})
# The rules by which tools divide parameters, the commonest first: what the names of those that do not decay have in
# them, and whether torch's LayerNorms, whatever their names, do not decay either.
_RULES = {
    "transformers' rule": (r"(?ai)bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", True),
    "all but norms and biases decay": (r"bias|(?i:norm)", True),
    "all but parameters named layernorm, rmsnorm or bias decay": (r"(?ai)bias|layernorm|rmsnorm", False),
    "all but biases decay": (r"bias", True),
    "all but LayerNorm.weight and biases decay": (r"bias|LayerNorm\.weight|layer_norm\.weight", False),
}


def own_names(groups: Sequence[Mapping[str, Any]], changed: Mapping[str, str] = NONE_RENAMED) -> dict[Any, str] | None:
    """The names that an optimizer has in place of numbers, with new ones; None where it has numbers."""
    keys = [key for group in groups for key in group.get("params") or ()]
    if not keys or not all(type(key) is str for key in keys):
        return None
    return {key: changed.get(name := clean_name(key), name) for key in keys}


def numbered_names(
    groups: Sequence[Mapping[str, Any]],
    shapes: Mapping[int, Shape],
    parameters: Mapping[str, Shape],
    where: str,
    layer_norms: frozenset[str] = frozenset(),
    frozen: frozenset[str] = frozenset(),
    renamed: Mapping[str, str] | None = None,
    tool: str | None = None,
) -> tuple[dict[int, str], str]:
    """The parameters' names by number, and the rule that fits, in words.

    Args:
        groups: The optimizer's groups, with numbers in "params", and perhaps names in "param_names".
        shapes: Of the states, by number; parameters without state are missing.
        parameters: Names to shapes, in the model's order.
        where: The file, for messages.
        layer_norms: Parameters of torch's LayerNorm.
        frozen: Parameters that an optimizer may not have, because the model's class, or the user, does not train them.
        renamed: Names of the saving program to those of `parameters`, where they differ.
        tool: Of optimizers that a tool makes itself, which all do in two groups: its name. One group is then an
            optimizer of the user's, whose order is in no file.

    Raises:
        CheckpointMismatch: No rule fits, the order is unknown, or the optimizer's own names are those of another model.
    """
    numbers = [_numbers(group, where) for group in groups]
    flat = [number for group in numbers for number in group]
    if len(set(flat)) != len(flat):
        raise CheckpointMismatch(f"{where}: two parameters of the optimizer have one number; the file is corrupted")
    if (given := _given_names(groups, numbers, shapes, renamed or {}, parameters, where)) is not None:
        return given, "its own names"
    if tool is not None and len(groups) == 1:
        raise CheckpointMismatch(
            f"{where}: the optimizer has one parameter group, where {tool} makes two, so its order of parameters is "
            "the program's own and in no file; import the model alone with --model-only"
        )
    trained = [name for name in parameters if name not in frozen]
    candidates = chain(
        _candidates(list(parameters), len(numbers), layer_norms),
        _candidates(trained, len(numbers), layer_norms) if frozen else (),
    )
    fits, unfit = _fitting(candidates, numbers, shapes, parameters)
    if len(fits) == 1 or (fits and not shapes):
        fitting, rule = next(iter(fits.items()))
        return dict(zip(flat, fitting, strict=True)), rule
    raise CheckpointMismatch(
        f"{where}: the optimizer's numbers cannot be matched with the model's {len(parameters)} parameters: {unfit}; "
        "name those that were frozen (--frozen 'model.layers.0.*'), or import the model alone with --model-only"
    )


def _fitting(
    candidates: Iterable[tuple[str, list[list[str]]]],
    numbers: Sequence[Sequence[int]],
    shapes: Mapping[int, Shape],
    parameters: Mapping[str, Shape],
) -> tuple[dict[tuple[str, ...], str], str]:
    """The names by all rules that fit, with the rule; and why there is not one, in words."""
    flat = [number for group in numbers for number in group]
    unfit = f"its groups have {' and '.join(str(len(group)) for group in numbers)} parameters"
    fits: dict[tuple[str, ...], str] = {}
    for rule, candidate in candidates:
        if [len(group) for group in candidate] != [len(group) for group in numbers]:
            continue
        names = [name for group in candidate for name in group]
        wrong = next(
            (n for n, name in zip(flat, names, strict=True) if shapes.get(n) not in (None, parameters[name])), None
        )
        if wrong is None:
            fits.setdefault(tuple(names), rule)
            continue
        name = names[flat.index(wrong)]
        unfit = f"its state {wrong} is {list(shapes[wrong])}, where {name} is {list(parameters[name])}"
    if fits:
        unfit = f"several rules fit, and give a state to different parameters: {'; '.join(fits.values())}"
    return fits, unfit


def _numbers(group: Mapping[str, Any], where: str) -> list[int]:
    found = group.get("params")
    if not isinstance(found, list | tuple) or any(type(number) is not int for number in found):
        raise CheckpointMismatch(f"{where}: a group of the optimizer has no list of parameters")
    return list(found)


def agreed_names(
    found: ForeignCheckpoint,
    groups: Sequence[Mapping[str, Any]],
    shapes: Mapping[int, Shape],
    where: Path,
    outline: ModelOutline | None,
    saved: Mapping[str, Shape] | None,
    renamed: Mapping[str, str] = NONE_RENAMED,
    tool: str | None = None,
) -> dict[int, str]:
    """The names by the order of parameters in the config's model, and by that of the file's tensors: of these, those
    that fit have to agree. Adds to `found` where they come from. `saved` is None where the file's order is arbitrary.

    With new names (`renamed`), the saving program has another class than the config. The rest is as for
    `numbered_names`. Raises CheckpointMismatch where there is no order, none fits, or two give different names.
    """
    orders: dict[str, Mapping[str, Shape]] = {}
    if outline is not None and all(old == new for old, new in renamed.items()):
        orders[CONFIG] = outline.parameters
    if saved is not None:
        orders[FILE_ORDER] = {n: shape for n, shape in saved.items() if outline is None or n in outline.parameters}
    if not orders:
        raise CheckpointMismatch(
            f"{where} numbers the optimizer's parameters, and no file here says in which order the model has them; "
            f"give the model's {CONFIG} with --config, or import the model alone with --model-only"
        )
    norms, frozen = (outline.layer_norms, outline.frozen) if outline is not None else (frozenset(), frozenset())
    fits: list[tuple[str, dict[int, str], str]] = []
    errors: list[CheckpointMismatch] = []
    for source, known in orders.items():
        try:
            fits.append((source, *numbered_names(groups, shapes, known, str(where), norms, frozen, renamed, tool)))
        except CheckpointMismatch as error:
            errors.append(error)
    if not fits:
        raise errors[0]
    source, names, rule = fits[0]
    if any(other != names for _, other, _ in fits):
        raise CheckpointMismatch(
            f"{where} numbers the optimizer's parameters, and {' and '.join(orders)} differ in which is which; import "
            "the model alone with --model-only"
        )
    found.assumed.append(f"the optimizer numbers its parameters; their names follow from {source} ({rule})")
    return names


def _given_names(
    groups: Sequence[Mapping[str, Any]],
    numbers: Sequence[Sequence[int]],
    shapes: Mapping[int, Shape],
    renamed: Mapping[str, str],
    parameters: Mapping[str, Shape],
    where: str,
) -> dict[int, str] | None:
    """The names that the optimizer has, by number; None where it has none."""
    found: dict[int, str] = {}
    for group, own in zip(groups, numbers, strict=True):
        names = group.get(NAMES)
        if not isinstance(names, list | tuple) or len(names) != len(own):
            return None
        for number, given in zip(own, names, strict=True):
            cleaned = clean_name(str(given))
            while cleaned.startswith("module.") and cleaned not in parameters and cleaned not in renamed:
                cleaned = cleaned.removeprefix("module.")
            found[number] = renamed.get(cleaned, cleaned)
    for number, name in found.items():
        if name not in parameters:
            raise CheckpointMismatch(
                f"{where}: the optimizer has a parameter {name[:80]!r}, and the model has none of that name; import "
                "the model alone with --model-only"
            )
        if shapes.get(number) not in (None, parameters[name]):
            raise CheckpointMismatch(
                f"{where}: the optimizer's state {number} is {list(shapes[number])}, and its parameter {name} is "
                f"{list(parameters[name])}"
            )
    if len(set(found.values())) != len(found):
        raise CheckpointMismatch(f"{where}: two parameters of the optimizer have one name; the file is corrupted")
    return found


def _candidates(names: Sequence[str], count: int, layer_norms: frozenset[str]) -> Iterator[tuple[str, list[list[str]]]]:
    if count == 1:
        yield "one group", [list(names)]
    for rule, (pattern, all_norms) in _RULES.items():
        without = {name for name in names if re.search(pattern, name) or (all_norms and name in layer_norms)}
        both = [[name for name in names if name not in without], [name for name in names if name in without]]
        yield rule, both
        yield f"{rule}, the others first", both[::-1]
        used = [group for group in both if group]
        if len(used) != 2:
            yield rule, used
