"""A config → the texts of training and validation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepmark.config.data_arguments import STDLIB, DataArguments
from stepmark.data.sources.columns import choose_column, describe_columns, text_of
from stepmark.data.sources.read_meter import ReadMeter
from stepmark.data.sources.stdlib import stdlib_texts
from stepmark.data.sources.text_files import file_corpus
from stepmark.data.sources.texts import Corpus, Texts
from stepmark.errors import DataError, UsageError

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["DataArguments", "Sources", "open_sources"]


@dataclass(frozen=True)
class Sources:
    """The texts of a run. Without validation texts, `held_out` percent of the training texts become the validation
    set; 0 if there is no validation, or it has separate texts."""

    train: Corpus
    validation: Corpus | None
    held_out: int = 0

    @property
    def content(self) -> str:
        """Changes when the texts, or how they are divided, do."""
        validation = self.validation.content if self.validation else None
        return f"train={self.train.content} validation={validation} held_out={self.held_out}"

    def divided(self) -> tuple[Corpus, Corpus | None]:
        """Training and validation texts, after holding out `held_out` percent."""
        return self.train.split(self.held_out) if self.held_out else (self.train, self.validation)


def open_sources(config: DataArguments) -> Sources:
    """Finds the texts that `config` names; files are read only to compute their checksums.

    Raises DataError for missing or unusable data, and UsageError for fields that do not match it.
    """
    percentage = config.validation_split_percentage
    column = config.text_column
    given = file_corpus("validation_file", config.validation_file, column) if config.validation_file else None
    if config.train_file:
        train: Corpus = file_corpus("train_file", config.train_file, column)
        validation = None
    elif config.dataset_name == STDLIB:
        train, validation = stdlib_texts(0 if given else percentage)
    else:
        train, validation = _dataset_texts(config)
    if column is not None and train.is_plain and (given is None or given.is_plain):
        files = train.where if given is None else f"{train.where} and {given.where}"
        raise UsageError(f"text_column is given, but the data has no columns ({files} are plain text); remove it")
    validation = given or validation
    return Sources(train, validation, 0 if validation is not None else percentage)


def _dataset_texts(config: DataArguments) -> tuple[Corpus, Corpus | None]:
    assert config.dataset_name is not None
    splits = load_splits(config.dataset_name, config.dataset_config_name)
    texts = {name: _split_texts(splits[name], name, config) for name in ("train", "validation") if name in splits}
    return texts["train"], texts.get("validation")


def load_splits(name: str, config_name: str | None) -> dict[str, Any]:
    """The splits of a folder made by `save_to_disk`, or of what `load_dataset` finds; `train` is one of them.

    Raises UsageError where it cannot be loaded, and DataError where it has no training split.
    """
    import datasets

    folder = Path(name)
    saved = (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()
    try:
        loaded = datasets.load_from_disk(name) if saved else datasets.load_dataset(name, config_name)
    except Exception as error:  # the library, the network and parsers raise dozens of kinds
        reason = (str(error).strip() or type(error).__name__).split("\n", 1)[0]
        raise UsageError(
            f"dataset_name: {name} cannot be loaded ({reason}); give python-stdlib, a folder made by save_to_disk,"
            " or a name of the Hugging Face hub that can be reached"
        ) from error
    splits = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    if "train" not in splits:
        raise DataError(
            f"dataset_name: {name} has no split train; it has {', '.join(splits)}; name a dataset that"
            " has one, or save the split that you want by itself with save_to_disk and give that folder"
        )
    return splits


def _split_texts(split: Dataset, name: str, config: DataArguments) -> Corpus:
    where = f"dataset_name {config.dataset_name}, split {name}"
    strings = [
        key for key, kind in split.features.items() if getattr(kind, "dtype", None) in ("string", "large_string")
    ]
    column = choose_column(split.column_names, strings, config.text_column, where)
    plain = split.select_columns([column]).with_format(None)

    meter = ReadMeter(len(split))

    def read() -> Iterator[str | None]:
        meter.done = 0
        for rows in plain.iter(batch_size=1024):
            meter.done += len(rows[column])
            for value in rows[column]:
                yield text_of(value, where, column)

    # The fingerprint is the library's own name for a dataset's content after all transforms.
    content = f"{split._fingerprint}:{len(split)}:{column}"
    reads = describe_columns(column, split.column_names)
    return Corpus((Texts(where, content, read, meter=meter, reads=reads),))
