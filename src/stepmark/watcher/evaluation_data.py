"""What an evaluation outside of training is asked for: the command line, and its texts: the run's, or --data's."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from glob import has_magic
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.checkpoint_folders import checkpoints, step_of
from stepmark.checkpoint.format.manifest import MANIFEST
from stepmark.config.data_arguments import (
    STDLIB,
    TABLES,
    DataArguments,
    file_names,
    may_have_columns,
    uncompressed_suffix,
)
from stepmark.config.recipe import Recipe
from stepmark.errors import CheckpointNotFound, DataError, UsageError
from stepmark.evaluation.run_options import RunOptions

MODEL_CONFIGS = ("config.json", "adapter_config.json")  # one of which a model's or an adapter's folder has
_OF_VALIDATION = re.compile(r"(?<![a-z])(validation|valid|val|dev)(?![a-z])", re.IGNORECASE)
_NAMED = re.compile(r"([A-Za-z]\w*)=(.+)\Z", re.DOTALL)


@dataclass(frozen=True)
class EvaluationSet:
    """Blocks of tokens, an identifier of their content, and what they were read from."""

    blocks: Any
    content: str
    source: str = ""


@dataclass(frozen=True)
class Request:
    """The command line of `stepmark evaluate`. `data`: the values of --data, each `[NAME=]SOURCE`; sizes and columns,
    where given, override those of the run. With `update_best` the run's `best` follows the results also on data other
    than its own. With `watch` it waits for checkpoints until the run has ended, or step `until`, or a later one, is
    done; `interval`: seconds between two polls. After `patience` evaluations without a better one, by `metric`, the run
    is asked to stop."""

    path: Path
    watch: bool = False
    data: Sequence[str] = ()
    text_column: str | None = None
    messages_column: str | None = None
    assistant_only_loss: bool | None = None
    block_size: int | None = None
    max_samples: int | None = None
    update_best: bool = False
    batch_size: int | None = None
    device: str = "auto"
    until: int | None = None
    patience: int | None = None
    metrics: str | None = None
    evaluator: str | None = None
    metric: str | None = None
    greater_is_better: bool | None = None
    interval: float = 2.0
    json: bool = False
    trust_remote_code: bool = False
    base_model: str | None = None
    attn_implementation: str | None = None

    def check(self) -> None:
        """Raises UsageError for invalid arguments, before anything is loaded."""
        names = [name for name, _ in map(split_name, self.data)]
        if len(names) > 1 and (None in names or len(set(names)) < len(names)):
            raise UsageError("--data: several sets need distinct names: --data NAME=FILE --data OTHER=FILE")
        for _, source in map(split_name, self.data):
            looks_like_path = source.startswith((".", "~", "/")) or Path(source).suffix in (".txt", ".jsonl", ".json")
            if looks_like_path and not has_magic(source) and not Path(source).expanduser().exists():
                raise UsageError(f"--data: {source} does not exist; name a file, a folder, or {STDLIB}")
        if self.text_column is not None and self.messages_column is not None:
            why = "--text_column and --messages_column: samples are texts or conversations; give one of them"
            raise UsageError(why)
        least = {"block_size": 2, "max_samples": 1, "batch_size": 1, "until": 0, "patience": 1}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise UsageError(f"--{name}: should be at least {smallest}, and is {value}")
        if not 0 < self.interval <= 3600:
            raise UsageError(f"--interval: should be a number of seconds above 0, up to 3600, and is {self.interval}")
        if not self.path.is_dir() and not (self.watch and not self.path.exists()):
            raise CheckpointNotFound(f"there is no folder {self.path}")
        if self.is_run:
            if self.path.is_dir() and not os.access(self.path, os.W_OK | os.X_OK):
                raise UsageError(f"{self.path} cannot be written to, and its evaluations are written there")
            return
        for name in ("watch", "until", "patience", "metric", "greater_is_better"):
            if getattr(self, name) not in (None, False):
                raise UsageError(f"--{name}: applies to a run, but {self.path} is a single model")

    def columns(self, options: RunOptions) -> dict[str, Any]:
        """Data fields for the columns of a table: those of the run, unless a column is given."""
        found = {**(options.columns or {})}
        if self.text_column is not None:
            found = {"text_column": self.text_column}
        elif self.messages_column is not None:
            found |= {"text_column": None, "messages_column": self.messages_column}
        if self.assistant_only_loss is not None:
            found["assistant_only_loss"] = self.assistant_only_loss
        given = self.data or self.assistant_only_loss  # else the run's own sources may have columns of their own
        if given and found.get("assistant_only_loss") and not found.get("messages_column"):
            raise UsageError("--assistant_only_loss: is for conversations; give --messages_column, or leave it out")
        return found

    @property
    def is_run(self) -> bool:
        """Whether the path is a run, or will become one; otherwise it is a single checkpoint or model."""
        if (self.path / MANIFEST).exists() or step_of(self.path) is not None:
            return False
        return bool(checkpoints(self.path)) or not any(os.path.lexists(self.path / name) for name in MODEL_CONFIGS)


def split_name(source: str) -> tuple[str | None, str]:
    """Splits `[NAME=]SOURCE` into its two parts."""
    match = _NAMED.match(source)
    if match is None or Path(source).exists():
        return None, source
    return match[1], match[2]


def prepare_sets(
    request: Request, options: RunOptions, recipe: Recipe | None, tokenizer: Any, longest: int | None
) -> dict[str | None, EvaluationSet]:
    """The evaluation sets by name, or None. `options`: the settings of the run; `longest`: the model's positions.

    Raises UsageError where there is nothing to evaluate on, and DataError where that is empty or cannot be read.
    """
    from stepmark.data.prepared_data import DEFAULT_BLOCK_SIZE, prepare

    wanted = request.block_size or options.block_size
    if wanted is not None and longest is not None and wanted > longest:
        raise UsageError(f"--block_size: {wanted} tokens are more than the model's {longest} positions; lower it")
    block_size = wanted or min(DEFAULT_BLOCK_SIZE, tokenizer.model_max_length, longest or DEFAULT_BLOCK_SIZE)
    sets: dict[str | None, EvaluationSet] = {}
    for name, (config, or_all) in _choose(request, request.columns(options), recipe, block_size).items():
        try:
            data = prepare(config, tokenizer, may_be_short=or_all)
        except (DataError, UsageError) as error:  # a file that is read completely was given in another field
            given = "--data" if request.data else "validation_file"
            message = str(error).replace("train_file: ", f"{given}: ", 1) if or_all else str(error)
            raise type(error)(message if request.data else f"{message}; name other data with --data") from error
        in_full = or_all and data.validation is None
        blocks = data.train if in_full else data.validation
        where = ", ".join(file_names(config.train_file)) or config.dataset_name or "dataset_mixture"
        if blocks is None:
            raise UsageError(f"{where} has no validation data; name a file with --data, all of which is then used")
        if not len(blocks):
            raise DataError(f"{where}: its validation data is empty; name other data with --data")
        content = f"{data.fingerprint} {len(blocks)} {'all' if in_full else 'validation'}"
        sets[name] = EvaluationSet(blocks, content, where if in_full else f"the validation part of {where}")
    return sets


def _choose(
    request: Request, columns: dict[str, Any], recipe: Recipe | None, block_size: int
) -> dict[str | None, tuple[DataArguments, bool]]:
    """The data to read, by name, and whether all of it is evaluated where it has no validation part."""
    samples = request.max_samples
    if request.data:
        return {
            name: _of_source(source, columns, recipe, block_size, samples)
            for name, source in map(split_name, request.data)
        }
    assert recipe is not None  # `EvaluationSetup.prepare` refuses to read data that nothing names
    data = recipe.data
    samples = samples or data.max_eval_samples
    if data.validation_file:  # the training data need not be read
        names = file_names(data.validation_file)
        return {None: _all_of(names, columns, block_size, samples, data.preprocessing_num_workers)}
    config = replace(data, **columns, block_size=block_size, max_train_samples=None, max_eval_samples=samples)
    return {None: (replace(config, overwrite_cache=False), False)}


def _of_source(
    source: str, columns: dict[str, Any], recipe: Recipe | None, block_size: int, samples: int | None
) -> tuple[DataArguments, bool]:
    path = Path(source).expanduser()
    if path.is_file() or has_magic(source) or (path.is_dir() and not _is_dataset(path)):
        return _all_of([str(path)], columns, block_size, samples)
    name = str(path) if path.is_dir() else source
    percentage = _held_out(name, recipe)
    config = DataArguments(
        dataset_name=name,
        **({} if source == STDLIB else columns),
        block_size=block_size,
        validation_split_percentage=percentage,
        max_train_samples=None if percentage else samples,
        max_eval_samples=samples,
    )
    return config, not percentage


def _is_dataset(folder: Path) -> bool:
    """Whether `datasets` knows which files of a folder are for validation: of `save_to_disk`, or by a table's name."""
    if any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return True
    return any(uncompressed_suffix(file) in TABLES and _OF_VALIDATION.search(file.stem) for file in folder.rglob("*"))


def _held_out(name: str, recipe: Recipe | None) -> int:
    """Which percentage of a dataset without a validation split is for validation: 0 where the run trains on none."""
    trained_on = {source.dataset_name for source in recipe.data.sources} if recipe is not None else set()
    own = name in trained_on or any(each and Path(each).is_dir() and Path(name).samefile(each) for each in trained_on)
    if own or name == STDLIB:
        of_run = recipe.data.validation_split_percentage if recipe is not None else 0
        return of_run or DataArguments.validation_split_percentage
    return 0


def _all_of(
    names: list[str], columns: dict[str, Any], block_size: int, samples: int | None, processes: int | None = None
) -> tuple[DataArguments, bool]:
    """All of the files; columns of the run's tables are nothing to a file without columns."""
    config = DataArguments(
        train_file=names,
        **({} if _are_plain(names, columns) else columns),
        block_size=block_size,
        validation_split_percentage=0,
        max_train_samples=samples,
        preprocessing_num_workers=processes,
    )
    return config, True


def _are_plain(names: list[str], columns: dict[str, Any]) -> bool:
    """Whether none of the files has columns, where that matters; a folder has to be looked into."""
    if not any(map(may_have_columns, names)):
        return True
    if columns.get("text_column") is None:
        return False
    from stepmark.data.sources.source_files import find_files

    return not any(uncompressed_suffix(file) in TABLES for file in find_files("--data", names)[0])
