"""A recipe: flat YAML whose fields belong to the training arguments, the model or the data."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from stepmark.config.data_arguments import SOURCE_FIELDS, WEIGHT, DataArguments
from stepmark.config.fields import (
    ABOVE_0,
    FRACTION,
    LOCAL,
    PLACE,
    Field,
    at_least,
    check_fields,
    documented,
    fields_of,
    one_of,
    refuse,
)
from stepmark.config.training_fields import TrainingFields
from stepmark.config.unknown_fields import unknown_fields
from stepmark.config.yaml_file import parse_yaml
from stepmark.errors import UsageError

METRICS = ("eval_loss", "eval_perplexity", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
TASKS = ("sft", "dpo", "kto", "reward")
_OF_NO_TASK = """
    dataset_mixture packing overwrite_cache metrics pipeline_parallel_size expert_parallel_size sequence_parallel
"""
_OF_TEXTS = f"{_OF_NO_TASK} text_column messages_column assistant_only_loss label_smoothing_factor"
_UNREAD = {"sft": _OF_NO_TASK, "dpo": _OF_TEXTS, "kto": _OF_TEXTS, "reward": f"{_OF_TEXTS} sample_prompts"}
_LORA = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")


@documented
@dataclass(frozen=True)
class ModelArguments:
    """The model: a new one of `config_name`, or the weights in `model_name_or_path`; and its tokenizer.

    Raises:
        UsageError: A value has the wrong type or is out of range, or fields contradict each other.
    """

    model_name_or_path: Annotated[str | None, PLACE] = None
    config_name: Annotated[str | None, PLACE] = None
    config_overrides: dict | str | None = None
    tokenizer_name: Annotated[str | None, PLACE] = None
    chat_template_path: Annotated[str | None, LOCAL] = None
    trust_remote_code: bool = False
    attn_implementation: str | None = None
    peft: Annotated[str | None, one_of("lora")] = None
    lora_r: Annotated[int, at_least(1)] = 8
    lora_alpha: Annotated[float, ABOVE_0] = 16
    lora_dropout: Annotated[float, FRACTION] = 0.0
    lora_target_modules: str | list | None = "all-linear"
    task: Annotated[str | None, one_of(*TASKS)] = None
    task_options: dict | str | None = None

    def __post_init__(self) -> None:
        check_fields(self, ModelArguments)
        refuse(self._contradictions())

    def _contradictions(self) -> Iterator[str]:
        if self.model_name_or_path is None and self.config_name is None:
            yield "model_name_or_path or config_name: set one of them, to name the model to train"
        if self.model_name_or_path is not None and self.config_name is not None:
            yield "model_name_or_path and config_name: both name the model to train; set one of them"
        if self.config_overrides and self.config_name is None:
            yield "config_overrides: overrides are for a new model; set config_name, or leave them out"
        if self.tokenizer_name is None and self.model_name_or_path is None:
            yield "tokenizer_name: a new model needs one; `bytes` is built in"
        if self.task_options and self.task is None:
            yield "task_options: are for a task; set task, or leave them out"
        for name in _LORA:
            if self.peft is None and getattr(self, name) != getattr(type(self), name):
                yield f"{name}: is for an adapter; set peft: lora, or leave it out"
        if self.peft is not None and self.model_name_or_path is None:
            yield "peft: an adapter is trained over a model's weights; set model_name_or_path"


@dataclass(frozen=True)
class EvaluationArguments:
    """What evaluations compute besides the loss."""

    metrics: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, EvaluationArguments)


@dataclass(frozen=True)
class Recipe:
    training: TrainingFields
    model: ModelArguments
    data: DataArguments
    evaluation: EvaluationArguments = EvaluationArguments()

    def __post_init__(self) -> None:
        task = str(self.model.task)
        for part, kind in PARTS.items():
            for name, field in fields_of(kind).items():
                if name in _UNREAD.get(task, "").split() and getattr(getattr(self, part), name) != field.default:
                    raise UsageError(f"{name}: is not read with task: {task}; leave one of the two out")
        refuse(self._contradictions())

    def _contradictions(self) -> Iterator[str]:
        named, key = self.evaluation.metrics, self.training.best_metric_key
        if self.training.eval_strategy == "no":
            if named is not None:
                yield "metrics and eval_strategy: metrics need evaluations; set eval_strategy to steps or epoch"
        elif key not in (None, *METRICS) and named is None and self.model.task is None:
            yield (
                f"metric_for_best_model: evaluations have no {key} without a function that computes it; name one with "
                f"metrics: my_module:my_function, or choose one of {', '.join(METRICS)}"
            )

    def refuse_task(self, command: str, remedy: str) -> None:
        """Raises UsageError where the recipe has a task, for what knows the data of language models only."""
        if self.model.task is not None:
            raise UsageError(
                f"task: {command} does not know the samples that TRL makes for {self.model.task}; {remedy}"
            )


_TEXT = "STEPMARK_RECIPE"  # a recipe's path, and its text as it was when the run began
_LARGEST = 1_000_000  # characters of a recipe: a longer one would keep the parser for minutes
_LONGEST = 100_000  # bytes that a variable may have
DO_TRAIN = "do_train"  # of transformers' scripts; true is accepted
PARTS: dict[str, type] = {
    "model": ModelArguments,
    "data": DataArguments,
    "training": TrainingFields,
    "evaluation": EvaluationArguments,
}


@cache
def all_fields() -> Mapping[str, Field]:
    return {name: field for part in PARTS.values() for name, field in fields_of(part).items()}


@cache
def sections() -> Mapping[str, list[Field]]:
    """The fields by the sections of `--help`."""
    found: dict[str, list[Field]] = {}
    for field in all_fields().values():
        found.setdefault(field.help.section, []).append(field)
    return found


def recipe_schema() -> dict[str, Any]:
    """A JSON schema of recipes, for editors: every field with its types, values, default, description and example."""
    fields = {name: field.schema() for name, field in all_fields().items()}
    weight = {"type": "number", "exclusiveMinimum": 0, "description": "Share of the samples, relative to the others'."}
    source = {WEIGHT: weight, **{name: fields[name] for name in SOURCE_FIELDS}}
    fields["dataset_mixture"]["items"] = {**_object(source), "required": [WEIGHT]}
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Stepmark recipe", **_object(fields)}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def is_switch(name: str) -> bool:
    """Whether a flag may stand without a value, for true."""
    return name == DO_TRAIN or bool in all_fields()[name].types


def read_recipe(path: str | None, flags: Mapping[str, str]) -> Recipe:
    """The recipe in the file at `path`, if one is given, overridden by the flags.

    Raises UsageError that names all unknown fields, or the one that has the wrong type or contradicts another.
    """
    values = {**(_read_file(path) if path else {}), **_read_flags(flags)}
    if values.get(DO_TRAIN) is True:  # what the command does
        del values[DO_TRAIN]
    unknown = [name for name in values if name not in all_fields()]
    if unknown:
        raise UsageError(unknown_fields(unknown, all_fields(), path))
    made = {
        part: kind(**{name: value for name, value in values.items() if name in fields_of(kind)})
        for part, kind in PARTS.items()
    }
    return Recipe(**made)


@contextlib.contextmanager
def kept_text(path: str | None) -> Iterator[None]:
    """Inside the block, processes that are started read the recipe as it is now: restarts ignore later edits."""
    text = _text_of(path) if path is not None else ""
    if path is not None and len(text.encode()) < _LONGEST:
        os.environ[_TEXT] = f"{Path(path).absolute()}\n{text}"
    try:
        yield
    finally:
        os.environ.pop(_TEXT, None)


def _text_of(path: str) -> str:
    kept, _, text = os.environ.get(_TEXT, "").partition("\n")
    if kept == str(Path(path).absolute()):
        return text
    with Path(path).open(encoding="utf-8") as file:
        text = file.read(_LARGEST + 1)
    if len(text) > _LARGEST:
        raise ValueError(f"it has more than {_LARGEST} characters")
    return text


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
    values: dict[str, Any] = {}
    for name, text in flags.items():
        accepted = (bool,) if name == DO_TRAIN else all_fields()[name].types
        try:
            value = parse_yaml(text)
        except ValueError as error:
            if str not in accepted:
                raise UsageError(f"{name}: cannot read {text!r}: {error}") from error
            value = text
        if value is None and text.strip().lower() not in ("", "~", "null"):  # a comment, or an anchor
            value = text
        keeps_text = str in accepted and not any(isinstance(value, kind) for kind in accepted if kind is not str)
        values[name] = text if keeps_text else value
    return values
