"""A recipe: flat YAML whose fields belong to the training arguments, the model or the data."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from stepmark.config.coercion import BOOL_TOO, convert_all, field_names
from stepmark.config.data_arguments import DataArguments
from stepmark.config.refusals import unknown_field
from stepmark.config.training_fields import TrainingFields
from stepmark.config.yaml_file import parse_yaml
from stepmark.errors import UsageError

_LORA = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")


@dataclass(frozen=True)
class ModelArguments:
    """Which model: a new one of `config_name` (a model type of transformers, or a folder with a config.json) with
    `config_overrides`, or the weights in `model_name_or_path`; and its tokenizer, by default that of the model, with
    the chat template in the file `chat_template_path`, by default its own. Python code that comes with them is executed
    only with `trust_remote_code`.

    With `peft: lora` the model's weights stay as they are, and an adapter of rank `lora_r`, scaled by `lora_alpha` /
    `lora_r`, is trained on the modules that `lora_target_modules` names."""

    model_name_or_path: str | None = None
    config_name: str | None = None
    config_overrides: dict | str | None = None
    tokenizer_name: str | None = None
    chat_template_path: str | None = None
    trust_remote_code: bool = False
    peft: str | None = None
    lora_r: int = 8
    lora_alpha: float = 16
    lora_dropout: float = 0.0
    lora_target_modules: str | list | None = "all-linear"

    def __post_init__(self) -> None:
        if self.model_name_or_path is None and self.config_name is None:
            raise UsageError("model_name_or_path or config_name: set one of them, to name the model to train")
        if self.model_name_or_path is not None and self.config_name is not None:
            raise UsageError("model_name_or_path and config_name: both name the model to train; set one of them")
        if self.config_overrides and self.config_name is None:
            raise UsageError("config_overrides: overrides are for a new model; set config_name, or leave them out")
        if self.tokenizer_name is None and self.model_name_or_path is None:
            raise UsageError("tokenizer_name: a new model needs one; `bytes` is built in")
        self._check_adapter()

    def _check_adapter(self) -> None:
        if self.peft is None:
            given = [name for name in _LORA if getattr(self, name) != getattr(type(self), name)]
            if given:
                raise UsageError(f"{given[0]}: is for an adapter; set peft: lora, or leave it out")
            return
        if self.peft != "lora":
            raise UsageError(f"peft: {self.peft!r} is unknown; choose lora, or leave it out to train all weights")
        if self.model_name_or_path is None:
            raise UsageError("peft: an adapter is trained over a model's weights; set model_name_or_path")
        if self.lora_r < 1:
            raise UsageError(f"lora_r: should be at least 1, and is {self.lora_r}")
        if self.lora_alpha <= 0:
            raise UsageError(f"lora_alpha: should be above 0, and is {self.lora_alpha:g}")
        if not 0 <= self.lora_dropout < 1:
            raise UsageError(f"lora_dropout: should be from 0 to below 1, and is {self.lora_dropout:g}")


@dataclass(frozen=True)
class EvaluationArguments:
    """What evaluations compute besides: `metrics`, `module:function`, whose numbers they report too."""

    metrics: str | None = None


@dataclass(frozen=True)
class Recipe:
    training: TrainingFields
    model: ModelArguments
    data: DataArguments
    evaluation: EvaluationArguments = EvaluationArguments()


_TEXT = "STEPMARK_RECIPE"  # a recipe's path, and its text as it was when the run began
_LONGEST = 100_000  # bytes that a variable may have
DO_TRAIN = "do_train"  # of transformers' scripts; true is accepted
PARTS: tuple[type, ...] = (TrainingFields, ModelArguments, DataArguments, EvaluationArguments)


@cache
def all_fields() -> Mapping[str, tuple[str, Any]]:
    """Every recipe field by name, with its type as text and its default."""
    fields = ((part, field) for part in PARTS for field in dataclasses.fields(part))
    return {field.name: (_kind(part, field.name), field.default) for part, field in fields}


def _kind(part: type, name: str) -> str:
    """The field's type as it is annotated: transformers' HfArgumentParser puts others into `dataclasses.fields`."""
    annotated = [inspect.get_annotations(owner) for owner in part.__mro__]
    kind = next(kinds[name] for kinds in annotated if name in kinds)
    return f"bool | {kind}" if name in BOOL_TOO else str(kind)


def is_switch(name: str) -> bool:
    """Whether a flag may stand without a value, for true."""
    return name == DO_TRAIN or "bool" in all_fields()[name][0].split(" | ")


def read_recipe(path: str | None, flags: Mapping[str, str]) -> Recipe:
    """The recipe in the file at `path`, if one is given, overridden by the flags.

    Raises UsageError that names all unknown fields, or the one that has the wrong type or contradicts another.
    """
    values = {**(_read_file(path) if path else {}), **_read_flags(flags)}
    if values.get(DO_TRAIN) is True:  # what the command does
        del values[DO_TRAIN]
    known = all_fields()
    unknown = [unknown_field(name, known, path) for name in values if name not in known]
    if unknown:
        raise UsageError("; ".join(unknown))
    parts = [
        part(**convert_all(part, {name: value for name, value in values.items() if name in field_names(part)}))
        for part in PARTS
    ]
    return Recipe(*parts)


@contextlib.contextmanager
def kept_text(path: str | None) -> Iterator[None]:
    """Inside the block, processes that are started read the recipe as it is now: ranks that are started again must not
    train what somebody has edited meanwhile."""
    text = Path(path).read_text(encoding="utf-8") if path is not None else ""
    if path is not None and len(text.encode()) < _LONGEST:
        os.environ[_TEXT] = f"{Path(path).absolute()}\n{text}"
    try:
        yield
    finally:
        os.environ.pop(_TEXT, None)


def _text_of(path: str) -> str:
    kept, _, text = os.environ.get(_TEXT, "").partition("\n")
    return text if kept == str(Path(path).absolute()) else Path(path).read_text(encoding="utf-8")


def _read_file(path: str) -> dict[str, Any]:
    try:
        content = parse_yaml(_text_of(path))
    except OSError as error:
        raise UsageError(f"recipe {path}: cannot be read: {error.strerror}; give the path of a recipe") from error
    except ValueError as error:
        raise UsageError(f"recipe {path}: is not valid YAML: {error}; write one `field: value` per line") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"recipe {path}: should be fields and values, one per line, and is a {type(content).__name__}")
    return {str(name): value for name, value in content.items()}


def _read_flags(flags: Mapping[str, str]) -> dict[str, Any]:
    """Flags are text; those for fields of other types are parsed as YAML."""
    hints = {name: hint for part in PARTS for name, hint in typing.get_type_hints(part).items()}
    values: dict[str, Any] = {}
    for name, text in flags.items():
        hint = hints.get(name, bool)  # DO_TRAIN
        accepted = typing.get_args(hint) or (hint,)
        try:
            value = parse_yaml(text)
        except ValueError as error:
            if str not in accepted:
                raise UsageError(f"{name}: cannot read {text!r}: {error}") from error
            value = text
        keeps_text = str in accepted and not any(isinstance(value, kind) for kind in accepted if kind is not str)
        values[name] = text if keeps_text else value
    return values
