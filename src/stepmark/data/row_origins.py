"""What samples hold: their texts, and the files and rows that these come from."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from typing import Any

from stepmark.config.data_arguments import DataArguments
from stepmark.data.chat.conversations import Conversations
from stepmark.data.loader.mixture import JoinedSamples
from stepmark.data.sources.sources import open_sources


def describe_samples(
    config: DataArguments, dataset: Any, indices: Collection[int], tokenizer: Any
) -> dict[int, dict[str, Any]]:
    """The samples of prepared data by index: `text`, with special tokens, `source`, from 1, in a mixture, and `origin`:
    the files and rows of conversations, which are read up to the last one, else the files of the source."""
    found = {}
    mixed = isinstance(dataset, JoinedSamples)
    for source, arguments in enumerate(config.sources):
        part = dataset.parts[source] if mixed else dataset
        first = sum(dataset.sizes[:source]) if mixed else 0
        mine = {index: index - first for index in indices if first <= index < first + len(part)}
        corpus = open_sources(arguments).divided()[0]
        names = [each.where for each in corpus.sources]
        rows: dict[int, Any] = dict.fromkeys(mine, range(len(names)))
        if isinstance(part, Conversations):
            rows = {index: part.rows_of(number) for index, number in mine.items()}
            names = [name for name, _ in islice(corpus.read(), max(map(max, rows.values()), default=-1) + 1)]
        for index, number in mine.items():
            text = tokenizer.decode(part[number]["input_ids"][: part.tokens_in(number)])
            origin = [names[row] for row in rows[index]]
            found[index] = {"text": text, "source": source + 1 if mixed else None, "origin": origin}
    return found
