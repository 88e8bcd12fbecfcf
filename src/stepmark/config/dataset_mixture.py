"""`dataset_mixture`: the sources of a recipe that mixes several, and the share of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from stepmark.config.coercion import convert
from stepmark.errors import UsageError

WEIGHT = "weight"
SOURCE_FIELDS = (
    "train_file",
    "dataset_name",
    "dataset_config_name",
    "text_column",
    "messages_column",
    "validation_file",
    "validation_split_percentage",
    "max_train_samples",
)
SHARED_FIELDS = ("validation_split_percentage", "messages_column")  # which the recipe may set for all sources


def check_entries(given: Sequence[Any], hints: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The sources as mappings of SOURCE_FIELDS and a `weight`, with the types of `hints`.

    Raises UsageError that names the source, from 1, for an unknown field, a value of the wrong type, or a weight that
    is missing or not above 0.
    """
    if len(given) < 2:
        raise UsageError(f"dataset_mixture: has {len(given)} sources; give two or more, or name the one by itself")
    entries = [_checked(entry, name_of(index), hints) for index, entry in enumerate(given)]
    for index, entry in enumerate(entries):
        source = {**entry, WEIGHT: None}
        earlier = next((other for other in range(index) if {**entries[other], WEIGHT: None} == source), None)
        if earlier is not None:
            raise UsageError(
                f"{name_of(index)}: is the same as source {earlier + 1}; name it once, with the sum of both weights"
            )
    return entries


def name_of(index: int) -> str:
    """What messages call the source with this index, from 0."""
    return f"dataset_mixture, source {index + 1}"


def _checked(entry: Any, where: str, hints: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        raise UsageError(f"{where}: should be fields such as {{train_file: a.txt, {WEIGHT}: 1}}, and is {entry!r}")
    for name in entry:
        if name != WEIGHT and name not in SOURCE_FIELDS:
            raise UsageError(
                f"{where}: {name!r} is not a field of a source; it has {', '.join((WEIGHT, *SOURCE_FIELDS))}"
            )
    if entry.get(WEIGHT) is None:
        raise UsageError(f"{where}: has no {WEIGHT}; give it one, its share of the samples in proportion to the others")
    weight = convert(f"{where}, {WEIGHT}", entry[WEIGHT], float)
    if not (math.isfinite(weight) and weight > 0):
        raise UsageError(f"{where}, {WEIGHT}: should be a number above 0, and is {entry[WEIGHT]!r}; or leave it out")
    fields = {name: convert(f"{where}, {name}", entry[name], hints[name]) for name in entry if name != WEIGHT}
    return {WEIGHT: weight, **fields}
