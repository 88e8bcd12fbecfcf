"""The data fields of a recipe."""

from __future__ import annotations

import glob
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from stepmark.config.fields import LOCAL, Values, at_least, check_fields, convert, documented, fields_of, refuse
from stepmark.errors import UsageError

STDLIB = "python-stdlib"
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
TABLES = (".json", ".jsonl", ".csv", ".parquet")
WEIGHT = "weight"  # of a source of a mixture, which has SOURCE_FIELDS besides
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
_PERCENT = Values(lambda value: 0 <= value < 100, "from 0 to 99", {"minimum": 0, "maximum": 99})


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


@documented
@dataclass(frozen=True)
class DataArguments:
    """The data fields of a recipe, with the names, meanings and defaults of Hugging Face's `run_clm` example.

    Without `validation_file`, validation texts are the dataset's own validation split, else the first
    `validation_split_percentage` percent of the training texts. A sample is a block of `block_size` tokens; with
    `messages_column`, one conversation or instruction in the tokenizer's chat template, or with `packing` a block of
    several. The sources of `dataset_mixture` have a `weight` and the fields of `SOURCE_FIELDS`.

    Raises:
        UsageError: A value has the wrong type or is out of range, or fields contradict each other.
    """

    dataset_name: str | None = None
    dataset_config_name: str | None = None
    text_column: str | None = None
    messages_column: str | None = None
    assistant_only_loss: bool = False
    packing: bool = False
    train_file: Annotated[str | list | None, LOCAL] = None
    dataset_mixture: list | None = None
    validation_file: Annotated[str | list | None, LOCAL] = None
    block_size: Annotated[int | None, at_least(2)] = None
    validation_split_percentage: Annotated[int, _PERCENT] = 5
    max_train_samples: Annotated[int | None, at_least(1)] = None
    max_eval_samples: Annotated[int | None, at_least(1)] = None
    preprocessing_num_workers: Annotated[int | None, at_least(1)] = None
    overwrite_cache: bool = False

    def __post_init__(self) -> None:
        check_fields(self, DataArguments)
        refuse(self._contradictions() if self.dataset_mixture is None else self._moved_into_sources())
        if self.dataset_mixture is not None:
            object.__setattr__(self, "dataset_mixture", self._checked_sources(self.dataset_mixture))

    @property
    def sources(self) -> tuple[DataArguments, ...]:
        """The data arguments of each source of a mixture alone; without one, these."""
        if self.dataset_mixture is None:
            return (self,)
        return tuple(self._source(entry) for entry in self.dataset_mixture)

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each source."""
        return tuple(float(entry[WEIGHT]) for entry in self.dataset_mixture or ({WEIGHT: 1.0},))

    def _source(self, entry: Mapping[str, Any]) -> DataArguments:
        fields = {name: value for name, value in entry.items() if name != WEIGHT}
        return replace(self, dataset_mixture=None, **fields)

    def _moved_into_sources(self) -> Iterator[str]:
        for name, field in fields_of(DataArguments).items():
            if name in SOURCE_FIELDS and name not in SHARED_FIELDS and getattr(self, name) != field.default:
                yield f"{name} and dataset_mixture: each source has its own; move {name} into the sources"

    def _checked_sources(self, given: Sequence[Any]) -> list[dict[str, Any]]:
        """The sources of a mixture as mappings of SOURCE_FIELDS and a `weight`.

        Raises UsageError that names the source, from 1, for an unknown field, a value of the wrong type, a weight that
        is missing or not above 0, or one that does not go with the sources before it.
        """
        if len(given) < 2:
            raise UsageError(f"dataset_mixture: has {len(given)} sources; give two or more, or name the one by itself")
        entries: list[dict[str, Any]] = []
        of_conversations = set()
        for index, each in enumerate(given):
            where = f"dataset_mixture, source {index + 1}"
            entry = _checked_source(each, where)
            same = next((at for at, other in enumerate(entries, 1) if {**other, WEIGHT: entry[WEIGHT]} == entry), None)
            if same is not None:
                raise UsageError(f"{where}: is the same as source {same}; name it once, with the sum of both weights")
            try:
                of_conversations.add(self._source(entry).messages_column is not None)
            except UsageError as error:
                raise UsageError(f"{where}: {error}") from error
            if len(of_conversations) > 1:
                raise UsageError(
                    f"{where}: samples are texts or conversations; give messages_column to all sources or none"
                )
            entries.append(entry)
        return entries

    def _contradictions(self) -> Iterator[str]:
        for field in ("train_file", "validation_file"):
            names = getattr(self, field)
            if isinstance(names, list) and not all(isinstance(name, str) and name for name in names):
                yield f"{field}: should be one or more paths, and is {names!r}"
        if self.dataset_name and self.train_file:
            yield "dataset_name and train_file are both given; training data has one source: remove one"
        if not self.dataset_name and not self.train_file:
            yield "there is no training data: give dataset_name, train_file or dataset_mixture"
        if self.dataset_config_name and self.dataset_name in (None, STDLIB):
            yield "dataset_config_name needs a dataset_name that has configurations; remove it"
        if self.text_column and self.messages_column is not None:
            yield "text_column and messages_column: samples are texts or conversations; set one of them"
        for field in ("assistant_only_loss", "packing"):
            if getattr(self, field) and self.messages_column is None:
                yield f"{field}: is for conversations; set messages_column to the column that has them, or leave it out"
        names = [*file_names(self.train_file), *file_names(self.validation_file)]
        has_columns = self.dataset_name not in (None, STDLIB) or any(map(may_have_columns, names))
        if self.text_column is not None and not has_columns:
            yield "text_column is given, but the data has no columns; remove it"


def _checked_source(entry: Any, where: str) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        raise UsageError(f"{where}: should be fields such as {{train_file: a.txt, {WEIGHT}: 1}}, and is {entry!r}")
    for name in entry:
        if name != WEIGHT and name not in SOURCE_FIELDS:
            raise UsageError(
                f"{where}: {name!r} is not a field of a source; it has {', '.join((WEIGHT, *SOURCE_FIELDS))}"
            )
    if entry.get(WEIGHT) is None:
        raise UsageError(f"{where}: has no {WEIGHT}; give it one, its share of the samples in proportion to the others")
    weight = convert(f"{where}, {WEIGHT}", entry[WEIGHT], (float,))
    if not (math.isfinite(weight) and weight > 0):
        raise UsageError(f"{where}, {WEIGHT}: should be a number above 0, and is {entry[WEIGHT]!r}; or leave it out")
    fields = fields_of(DataArguments)
    return {
        WEIGHT: weight,
        **{name: fields[name].checked(entry[name], f"{where}, {name}") for name in entry if name != WEIGHT},
    }
