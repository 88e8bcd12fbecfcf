"""What a run's training data are made of, in plain values: where a resumption is refused, it can say what changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepmark.config.data_arguments import DataArguments
from stepmark.filesystem.printable import listed

MOST_FILES = 200  # that a description lists
_FIELDS = "text_column messages_column assistant_only_loss packing max_train_samples dataset_name dataset_config_name"


def describe_source(
    config: DataArguments, block_size: int, held_out: int, texts: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """Describes data without a mixture. `texts`: the name and an identifier of the content of each file or dataset;
    `held_out`: the percentage of them that is validation data."""
    fields = {name: value for name in _FIELDS.split() if (value := getattr(config, name)) not in (None, False)}
    fields |= {"block_size": block_size, "validation_split_percentage": held_out}
    return {"fields": fields, "texts": {_absolute(name): content for name, content in texts[:MOST_FILES]}}


def data_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """What differs between two descriptions, in words; None where nothing in them does. The description of a mixture
    has those of its `sources`, and their `weights`."""
    return "; ".join(_differences(before, now)) or None


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    earlier, sources = before.get("sources") or [before], now.get("sources") or [now]
    if len(earlier) != len(sources):
        yield f"the number of sources was {len(earlier)} and is now {len(sources)}"
        return
    if before.get("weights") != now.get("weights"):
        yield f"the weights were {_weights(before)} and are now {_weights(now)}"
    for number, (old, new) in enumerate(zip(earlier, sources, strict=True), start=1):
        prefix = f"source {number}: " if len(sources) > 1 else ""
        yield from (f"{prefix}{each}" for each in [*_of_fields(old, new), *_of_texts(old, new)])


def _weights(description: Mapping[str, Any]) -> str:
    return ", ".join(f"{weight:g}" for weight in description.get("weights") or [1.0])


def _of_fields(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    old, new = before.get("fields", {}), now.get("fields", {})
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            yield f"{name} was {old.get(name, 'unset')} and is now {new.get(name, 'unset')}"


def _of_texts(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    old, new = before.get("texts", {}), now.get("texts", {})
    renamed = {*old.values()} & {*new.values()}
    changed = [name for name in new if name in old and old[name] != new[name]]
    added = [name for name in new if name not in old and new[name] not in renamed]
    removed = [name for name in old if name not in new and old[name] not in renamed]
    for names, what in ((changed, "changed"), (added, "added"), (removed, "no longer read")):
        if names:
            yield f"{listed(names, 3)}: {what}"


def _absolute(name: str) -> str:
    """A name as it is in messages, `train_file text.txt`, with its path from the root."""
    field, separator, path = name.partition(" ")
    return f"{field} {Path(path).expanduser().absolute()}" if field == "train_file" and separator else name
