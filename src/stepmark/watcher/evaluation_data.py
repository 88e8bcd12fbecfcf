"""The texts for an evaluation outside of training: the run's own validation data, or what --data names."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from glob import has_magic
from pathlib import Path
from typing import Any

from stepmark.config.data_arguments import STDLIB, DataArguments, file_names, may_have_columns
from stepmark.config.recipe import Recipe
from stepmark.errors import DataError, UsageError

MODEL_CONFIGS = ("config.json", "adapter_config.json")  # one of which a model's or an adapter's folder has
_NAMED = re.compile(r"([A-Za-z]\w*)=(.+)\Z", re.DOTALL)


@dataclass(frozen=True)
class EvaluationSet:
    """Blocks of tokens, an identifier of their content, and what they were read from."""

    blocks: Any
    content: str
    source: str = ""


@dataclass(frozen=True)
class DataChoice:
    """`sources` are the values of --data, each `[NAME=]SOURCE`; sizes, where given, override the recipe's. With
    `updates_best` the run's `best` follows the results also on data other than its own."""

    sources: tuple[str, ...] = ()
    block_size: int | None = None
    max_samples: int | None = None
    updates_best: bool = False

    def with_block_size(self, block_size: int | None) -> DataChoice:
        """With this block size, unless another was given."""
        return self if self.block_size is not None else replace(self, block_size=block_size)

    def check(self) -> None:
        """Raises UsageError for invalid values, before anything is loaded."""
        names = [name for name, _ in map(split_name, self.sources)]
        if len(names) > 1 and (None in names or len(set(names)) < len(names)):
            raise UsageError("--data: several sets need distinct names: --data NAME=FILE --data OTHER=FILE")
        for _, source in map(split_name, self.sources):
            looks_like_path = source.startswith((".", "~", "/")) or Path(source).suffix in (".txt", ".jsonl", ".json")
            if looks_like_path and not has_magic(source) and not Path(source).expanduser().exists():
                raise UsageError(f"--data: {source} does not exist; name a file, a folder, or {STDLIB}")
        for name, value, least in (("block_size", self.block_size, 2), ("max_samples", self.max_samples, 1)):
            if value is not None and value < least:
                raise UsageError(f"--{name}: should be at least {least}, and is {value}")


def split_name(source: str) -> tuple[str | None, str]:
    """Splits `[NAME=]SOURCE` into its two parts."""
    match = _NAMED.match(source)
    if match is None or Path(source).exists():
        return None, source
    return match[1], match[2]


def prepare_sets(
    choice: DataChoice, recipe: Recipe | None, tokenizer: Any, longest: int | None
) -> dict[str | None, EvaluationSet]:
    """The evaluation sets by name (None for one without a name). `longest`: the number of the model's positions.

    Raises DataError where there is nothing to evaluate on.
    """
    from stepmark.data.prepared_data import prepare

    configs = _configs(choice, recipe, _block_size(choice, recipe, tokenizer, longest))
    sets: dict[str | None, EvaluationSet] = {}
    for name, (config, in_full) in configs.items():
        try:
            data = prepare(config, tokenizer, may_be_short=in_full)
        except (DataError, UsageError) as error:  # a file that is read completely was given in another field
            given = "--data" if choice.sources else "validation_file"
            message = str(error).replace("train_file: ", f"{given}: ", 1) if in_full else str(error)
            raise type(error)(message if choice.sources else f"{message}; name other data with --data") from error
        blocks = data.train if in_full else data.validation
        where = ", ".join(file_names(config.train_file)) or config.dataset_name or "dataset_mixture"
        if blocks is None:
            raise DataError(f"{where} has no validation data; name a file with --data, all of which is then used")
        if not len(blocks):
            raise DataError(f"{where}: its validation data is empty; name other data with --data")
        content = f"{data.fingerprint} {len(blocks)} {'all' if in_full else 'validation'}"
        sets[name] = EvaluationSet(blocks, content, where)
    return sets


def _block_size(choice: DataChoice, recipe: Recipe | None, tokenizer: Any, longest: int | None) -> int:
    from stepmark.data.prepared_data import DEFAULT_BLOCK_SIZE

    wanted = choice.block_size or (recipe.data.block_size if recipe is not None else None)
    if wanted is not None and longest is not None and wanted > longest:
        raise DataError(f"--block_size: {wanted} tokens are more than the model's {longest} positions; lower it")
    return wanted or min(DEFAULT_BLOCK_SIZE, tokenizer.model_max_length, longest or DEFAULT_BLOCK_SIZE)


def _configs(
    choice: DataChoice, recipe: Recipe | None, block_size: int
) -> dict[str | None, tuple[DataArguments, bool]]:
    """By name: which data, and whether all of it is meant or the validation part."""
    if choice.sources:
        return {
            name: _of_source(source, choice, recipe, block_size) for name, source in map(split_name, choice.sources)
        }
    if recipe is None:
        raise DataError(f"--data: the run has no recipe that names its data; name a file, or {STDLIB}")
    data = recipe.data
    samples = choice.max_samples or data.max_eval_samples
    processes = data.preprocessing_num_workers
    if data.validation_file:  # the training data need not be read
        return {None: (_all_of(data.validation_file, block_size, samples, _columns(data), processes), True)}
    config = DataArguments(
        dataset_name=data.dataset_name,
        dataset_config_name=data.dataset_config_name,
        dataset_mixture=data.dataset_mixture,
        **_columns(data),
        train_file=data.train_file,
        block_size=block_size,
        validation_split_percentage=data.validation_split_percentage,
        max_eval_samples=samples,
        preprocessing_num_workers=processes,
    )
    return {None: (config, False)}


def _of_source(source: str, choice: DataChoice, recipe: Recipe | None, block_size: int) -> tuple[DataArguments, bool]:
    path = Path(source).expanduser()
    columns = _columns(recipe.data) if recipe is not None else {}
    if path.is_file() or has_magic(source):
        return _all_of(str(path), block_size, choice.max_samples, columns, None), True
    percentage = (
        recipe.data.validation_split_percentage if recipe is not None else DataArguments.validation_split_percentage
    )
    config = DataArguments(
        dataset_name=str(path) if path.is_dir() else source,
        **({} if source == STDLIB else columns),
        block_size=block_size,
        validation_split_percentage=percentage,
        max_eval_samples=choice.max_samples,
    )
    return config, False


def _columns(data: DataArguments) -> dict[str, Any]:
    """What is read of a table's rows, and how."""
    return {name: getattr(data, name) for name in ("text_column", "messages_column", "assistant_only_loss", "packing")}


def _all_of(
    path: str | list[str], block_size: int, samples: int | None, columns: dict[str, Any], processes: int | None
) -> DataArguments:
    plain = not any(map(may_have_columns, file_names(path)))
    return DataArguments(
        train_file=path,
        **({} if plain else columns),
        block_size=block_size,
        validation_split_percentage=0,
        max_train_samples=samples,
        preprocessing_num_workers=processes,
    )
