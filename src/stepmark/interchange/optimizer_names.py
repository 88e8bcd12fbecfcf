"""Names for the parameters of optimizers that number them.

A number is a position: all groups in order, within a group the order of the model's parameters. Which parameters a
group has is not stored, so the rules that the tools use are tried, and one is taken if the sizes of the groups and the
shape of every state fit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from stepmark.errors import CheckpointMismatch
from stepmark.sharding.layout import Shape

Decays = Callable[[str], bool]
_TRANSFORMERS = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def rules(layer_norms: frozenset[str] = frozenset()) -> dict[str, Decays]:
    """Which parameters decay, by the name of the rule, the commonest first. `layer_norms` are those of torch's
    LayerNorm."""

    def transformers(name: str) -> bool:
        return name not in layer_norms and not _TRANSFORMERS.search(name.lower())

    def norms_and_biases(name: str) -> bool:
        return name not in layer_norms and "bias" not in name and "norm" not in name.lower()

    def no_biases(name: str) -> bool:
        return name not in layer_norms and "bias" not in name

    def named_norms(name: str) -> bool:
        return not any(word in name.lower() for word in ("bias", "layernorm", "rmsnorm"))

    def no_layer_norm_weight(name: str) -> bool:
        return not any(word in name for word in ("bias", "LayerNorm.weight", "layer_norm.weight"))

    return {
        "transformers' rule": transformers,
        "all but norms and biases decay": norms_and_biases,
        "all but parameters named layernorm, rmsnorm or bias decay": named_norms,
        "all but biases decay": no_biases,
        "all but LayerNorm.weight and biases decay": no_layer_norm_weight,
    }


def numbered_names(
    groups: Sequence[Mapping[str, Any]],
    shapes: Mapping[int, Shape],
    parameters: Mapping[str, Shape],
    where: str,
    layer_norms: frozenset[str] = frozenset(),
    frozen: frozenset[str] = frozenset(),
) -> tuple[dict[int, str], str]:
    """The parameters' names by number, and the rule that fits, in words.

    Args:
        groups: The optimizer's groups, with numbers in "params".
        shapes: Of the states, by number; parameters without state are missing.
        parameters: Names to shapes, in the model's order.
        where: The file, for messages.
        layer_norms: Parameters of torch's LayerNorm.
        frozen: Parameters that an optimizer may not have, because the model's class does not train them.

    Raises:
        CheckpointMismatch: No rule fits.
    """
    numbers = [_numbers(group, where) for group in groups]
    flat = [number for group in numbers for number in group]
    if len(set(flat)) != len(flat):
        raise CheckpointMismatch(f"{where}: two parameters of the optimizer have one number; the file is corrupted")
    unfit = f"its groups have {' and '.join(str(len(group)) for group in numbers)} parameters"
    trained = [name for name in parameters if name not in frozen]
    candidates = chain(
        _candidates(list(parameters), len(numbers), layer_norms),
        _candidates(trained, len(numbers), layer_norms) if frozen else (),
    )
    for rule, candidate in candidates:
        if [len(group) for group in candidate] != [len(group) for group in numbers]:
            continue
        names = [name for group in candidate for name in group]
        wrong = next(
            (n for n, name in zip(flat, names, strict=True) if shapes.get(n) not in (None, parameters[name])), None
        )
        if wrong is None:
            return dict(zip(flat, names, strict=True)), rule
        name = names[flat.index(wrong)]
        unfit = f"its state {wrong} is {list(shapes[wrong])}, where {name} is {list(parameters[name])}"
    raise CheckpointMismatch(
        f"{where}: the optimizer's numbers cannot be matched with the model's {len(parameters)} parameters: {unfit}; "
        "import the model alone with --model-only"
    )


def _numbers(group: Mapping[str, Any], where: str) -> list[int]:
    found = group.get("params")
    if not isinstance(found, list | tuple) or any(type(number) is not int for number in found):
        raise CheckpointMismatch(f"{where}: a group of the optimizer has no list of parameters")
    return list(found)


def _candidates(names: Sequence[str], count: int, layer_norms: frozenset[str]) -> Iterator[tuple[str, list[list[str]]]]:
    if count == 1:
        yield "one group", [list(names)]
    for rule, decays in rules(layer_norms).items():
        both = [[name for name in names if decays(name)], [name for name in names if not decays(name)]]
        yield rule, both
        yield f"{rule}, the others first", both[::-1]
        used = [group for group in both if group]
        if len(used) != 2:
            yield rule, used
