"""The data fields of a recipe."""

from __future__ import annotations

import glob
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from stepmark.config.dataset_mixture import SHARED_FIELDS, SOURCE_FIELDS, WEIGHT, check_entries, name_of
from stepmark.errors import UsageError

STDLIB = "python-stdlib"
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
TABLES = (".json", ".jsonl", ".csv", ".parquet")


def uncompressed_suffix(path: Path) -> str:
    """The extension of a file without that of its compression, in lower case: `.txt` of `a.txt.gz`."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() in COMPRESSED else path.suffix.lower()


def may_have_columns(name: str) -> bool:
    """Whether what a field names may be a table; of folders and most patterns that is known once they are read."""
    suffix = uncompressed_suffix(Path(name))
    return suffix in TABLES or suffix == "" or glob.has_magic(suffix) or Path(name).is_dir()


def columns_of(data: DataArguments) -> dict[str, Any]:
    """The fields that say how a row becomes a sample."""
    return {name: getattr(data, name) for name in ("text_column", "messages_column", "assistant_only_loss", "packing")}


def file_names(given: str | list | None) -> list[str]:
    """The names in a field that holds one or several."""
    return [given] if isinstance(given, str) else list(given or [])


@dataclass(frozen=True)
class DataArguments:
    """The recipe's data fields, with the names, meanings and defaults of Hugging Face's `run_clm` example.

    Texts come from `dataset_name` (`python-stdlib`, a folder, or a name of the Hugging Face hub) or from `train_file`:
    one file, a folder, a pattern such as `data/**/*.jsonl`, or a list of these, also compressed;
    validation texts from `validation_file`, else from the dataset's own validation split, else from the first
    `validation_split_percentage` percent of the training texts (0: there is no validation). `max_train_samples` and
    `max_eval_samples` count blocks of `block_size` tokens. `text_column` is `text`, else the only column of strings.

    `dataset_mixture` is a list of sources in place of these: each has a `weight`, its share of the samples, and the
    fields of `SOURCE_FIELDS`.

    With `messages_column` the rows are conversations, or instructions, by the tokenizer's chat template, and
    `block_size` is the length at most of one, or with `packing` of a block of several. `assistant_only_loss`: what the
    assistant says is all that is trained on.

    Raises UsageError where fields contradict each other or are out of range.
    """

    dataset_name: str | None = None
    dataset_config_name: str | None = None
    text_column: str | None = None
    messages_column: str | None = None
    assistant_only_loss: bool = False
    packing: bool = False
    train_file: str | list | None = None
    dataset_mixture: list | None = None
    validation_file: str | list | None = None
    block_size: int | None = None
    validation_split_percentage: int = 5
    max_train_samples: int | None = None
    max_eval_samples: int | None = None
    preprocessing_num_workers: int | None = None
    overwrite_cache: bool = False

    def __post_init__(self) -> None:
        if self.dataset_mixture is None:
            self._check_sources()
        else:
            self._check_mixture()
        self._check_ranges()

    @property
    def sources(self) -> tuple[DataArguments, ...]:
        """The data arguments of each source of a mixture alone; without one, these."""
        if self.dataset_mixture is None:
            return (self,)
        entries = ({**entry} for entry in self.dataset_mixture)
        return tuple(replace(self, dataset_mixture=None, **_without_weight(entry)) for entry in entries)

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each source."""
        return tuple(float(entry[WEIGHT]) for entry in self.dataset_mixture or ({WEIGHT: 1.0},))

    def _check_mixture(self) -> None:
        assert self.dataset_mixture is not None
        for field in fields(self):
            given = getattr(self, field.name) != field.default
            if field.name in SOURCE_FIELDS and field.name not in SHARED_FIELDS and given:
                raise UsageError(
                    f"{field.name} and dataset_mixture: each source has its own; move {field.name} into the sources"
                )
        entries = check_entries(self.dataset_mixture, get_type_hints(DataArguments))
        object.__setattr__(self, "dataset_mixture", entries)
        of_conversations = []
        for index, entry in enumerate(entries):
            try:
                source = replace(self, dataset_mixture=None, **_without_weight(entry))
            except UsageError as error:
                raise UsageError(f"{name_of(index)}: {error}") from error
            of_conversations.append(source.messages_column is not None)
            if of_conversations[0] != of_conversations[-1]:
                raise UsageError(
                    f"{name_of(index)}: samples are texts or conversations; give messages_column to all sources or none"
                )

    def _check_sources(self) -> None:
        for field in ("train_file", "validation_file"):
            names = getattr(self, field)
            if isinstance(names, list) and not all(isinstance(name, str) and name for name in names):
                raise UsageError(f"{field}: should be one or more paths, and is {names!r}")
        if self.dataset_name and self.train_file:
            raise UsageError("dataset_name and train_file are both given; training data has one source: remove one")
        if not self.dataset_name and not self.train_file:
            raise UsageError("there is no training data: give dataset_name, train_file or dataset_mixture")
        if self.dataset_config_name and self.dataset_name in (None, STDLIB):
            raise UsageError("dataset_config_name needs a dataset_name that has configurations; remove it")
        for field in ("text_column", "assistant_only_loss", "packing"):
            if getattr(self, field) and (self.messages_column is None) != (field == "text_column"):
                raise UsageError(_conversation_fields(field))
        if self.text_column is not None and not self._has_columns():
            raise UsageError("text_column is given, but the data has no columns; remove it")

    def _has_columns(self) -> bool:
        names = [*file_names(self.train_file), *file_names(self.validation_file)]
        return self.dataset_name not in (None, STDLIB) or any(map(may_have_columns, names))

    def _check_ranges(self) -> None:
        if self.block_size is not None and self.block_size < 2:
            raise UsageError(f"block_size must be at least 2 tokens, not {self.block_size}")
        if not 0 <= self.validation_split_percentage < 100:
            raise UsageError(
                f"validation_split_percentage must be from 0 to 99, not {self.validation_split_percentage}"
            )
        for name in ("max_train_samples", "max_eval_samples", "preprocessing_num_workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}; leave it out for no limit")


def _without_weight(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != WEIGHT}


def _conversation_fields(field: str) -> str:
    if field == "text_column":
        return "text_column and messages_column: samples are texts or conversations; set one of them"
    return f"{field}: is for conversations; set messages_column to the column that has them, or leave it out"
