"""Which samples a run has trained in a step, by what it has recorded."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from stepmark.config.data_arguments import DataArguments
from stepmark.config.recipe import Recipe
from stepmark.data.chat.conversations import Conversations
from stepmark.data.loader.collate import sample_lengths
from stepmark.data.loader.loader import DataLoader
from stepmark.data.loader.mixture import JoinedSamples
from stepmark.data.prepared_data import Prepared, prepare
from stepmark.data.sources.sources import open_sources
from stepmark.errors import DataError, UsageError
from stepmark.filesystem.json_files import read_lines
from stepmark.recipe.model import build_tokenizer
from stepmark.recipe.used_recipe import USED_RECIPE, read_used_recipe
from stepmark.runtime.mesh import DATA
from stepmark.runtime.rank_grid import RankGrid
from stepmark.sharding.logical_ranks import LogicalRanks
from stepmark.trainer.run_folder.run_log import EVENTS, POSITION


class RunRows:
    """The samples of a run's steps. `missing` says why texts and origins of some that were asked for are not known."""

    def __init__(self, folder: Path, attempt: int | None = None, *, trusts_code: bool = False) -> None:
        """`attempt`: steps count as that resumption has trained them (0: before the first); default None, the last one.
        `trusts_code`: code that comes with the tokenizer is executed; default False.

        Raises UsageError where the run has not recorded the order of its samples.
        """
        self.missing: str | None = None
        self._folder, self._trusts_code = folder, trusts_code
        records = [line for line in read_lines(folder / EVENTS) if line.get("event") == POSITION]
        self._records = [line for line in records if attempt is None or line["attempt"] <= attempt]
        if attempt is not None and records and not 0 <= attempt <= (last := max(line["attempt"] for line in records)):
            raise UsageError(f"attempt: {attempt} was never made; name one from 0 to {last}")
        if not self._records:
            raise UsageError(
                f"{folder / EVENTS}: has no event `{POSITION}`, which says what order the samples had: no run has "
                "trained here, or one of an earlier version; name the folder of another run"
            )

    def of_steps(self, steps: range, rank: int | None = None) -> list[dict[str, Any]]:
        """The samples of these steps, counted from 1, of one rank or of all.

        Each has `step`, `epoch`, `ranks` (several where these share a model), `micro_batch`, and `sample`, its index in
        the training data; and what `describe_samples` knows.

        Raises:
            UsageError: The run does not have the step or the rank, or the order is not known.
            CheckpointMismatch: The data are of another size or order.
        """
        try:
            return [
                row
                for number, part in groupby(steps, self._record_of)
                for row in self._rows(self._records[number], list(part), rank)
            ]
        except (LookupError, TypeError, AttributeError, ArithmeticError, MemoryError) as error:
            raise UsageError(
                f"{self._folder / EVENTS}: an event `{POSITION}` is none that a run writes ({error}); name another run"
            ) from error

    def _record_of(self, step: int) -> int:
        """The number of the record in force at a step: the last one before it, since steps may be trained again."""
        before = [number for number, record in enumerate(self._records) if record["step"] < step]
        if not before:
            raise UsageError(f"--step: {self._folder} has no record of step {step}")
        return before[-1]

    def _rows(self, record: Mapping[str, Any], steps: list[int], rank: int | None) -> Iterator[dict[str, Any]]:
        grid = RankGrid(record["mesh"])
        if grid.size > 1 << 20:
            raise LookupError(f"it is of {grid.size} ranks")
        if rank is not None and not 0 <= rank < grid.size:
            raise UsageError(f"--rank: step {steps[0]} has ranks 0 to {grid.size - 1}, and no rank {rank}")
        sharing: dict[int, list[int]] = {}
        for each in range(grid.size):
            sharing.setdefault(grid.coordinates(each)[DATA], []).append(each)
        data, loader = self._loader(record)
        hosts = {
            part: (process, place)
            for process in sharing
            for place, part in enumerate(LogicalRanks(loader.layout.world_size, len(sharing), process).own)
        }
        taken = loader.samples_after(*(step - record["step"] - 1 for step in steps))
        rows: list[dict[str, Any]] = [
            {"step": step, "epoch": epoch, "ranks": sharing[process], "micro_batch": micro_batch, "sample": sample}
            for step, (epoch, parts) in zip(steps, taken, strict=True)
            for part, micro_batches in enumerate(parts)
            for process, place in [hosts[part]]
            for micro_batch, samples in enumerate(micro_batches, start=place * loader.layout.accumulation)
            for sample in samples
            if rank is None or rank in sharing[process]
        ]
        if data is None:
            return iter(rows)
        recipe, tokenizer, _ = self._of_recipe
        indices = {row["sample"] for row in rows}
        known = describe_samples(recipe.data, data.train, indices, tokenizer)
        return ({**row, **known[row["sample"]]} for row in rows)

    def _loader(self, record: Mapping[str, Any]) -> tuple[Prepared | None, DataLoader]:
        """The data, where they are those that were trained on, and a loader at the record's position."""
        position, order, lengths = record["loader"], record["loader"]["order"], None
        if "batch_size" not in position:
            raise UsageError(
                f"--step: the samples after step {record['step']} come from an iterable dataset or a loader of the "
                f"program's own ({order}), whose order only the program knows"
            )
        data: Prepared | None = None
        try:
            *_, data = self._of_recipe
            if data.fingerprint != record["data"]:
                raise DataError(f"the data of {self._folder / USED_RECIPE} have changed since")
        except (DataError, UsageError) as error:
            data, self.missing = None, f"texts and origins are not known: {error}"
        if data is None and ("mixture" in order or "lengths" in position):
            raise UsageError(f"--step: the order of the samples ({order}) depends on the data; {self.missing}")
        samples = range(position["dataset_size"]) if data is None else data.train
        if "lengths" in position:
            recipe, tokenizer, _ = self._of_recipe
            lengths = sample_lengths(samples, recipe.training.length_column_name, tokenizer.model_input_names[0])
        return data, DataLoader.of_record(position, samples, lengths)

    @functools.cached_property
    def _of_recipe(self) -> tuple[Recipe, Any, Prepared]:
        """The recipe, its tokenizer and its data."""
        recipe = read_used_recipe(self._folder, trusts_code=self._trusts_code)
        if recipe is None:
            raise DataError(f"the run was started from Python, and {self._folder} has no {USED_RECIPE}")
        recipe.refuse_task("stepmark rows", "samples are rows of the data in their order")
        tokenizer = build_tokenizer(recipe.model)
        return recipe, tokenizer, prepare(replace(recipe.data, overwrite_cache=False), tokenizer)


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
