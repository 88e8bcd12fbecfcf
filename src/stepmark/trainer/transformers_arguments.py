"""Converts transformers' TrainingArguments, for scripts that make those."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any

import transformers

from stepmark.config.training_fields import TrainingFields
from stepmark.config.transformers_defaults import ALIASES, SWITCHES, is_done, known_fields
from stepmark.config.unknown_field_message import unknown_field
from stepmark.errors import UsageError
from stepmark.trainer.seq2seq_arguments import Seq2SeqTrainingArguments
from stepmark.trainer.training_arguments import TrainingArguments


def converted(args: Any) -> Any:
    """Returns `args` as Stepmark's TrainingArguments where they are transformers' or a recipe's, those by default for
    None, and anything else as it is.

    Raises:
        UsageError: Fields that Stepmark lacks do not have their default value; all are named.
    """
    if args is None:
        return TrainingArguments()
    if isinstance(args, TrainingFields):
        return TrainingArguments.of(args)
    if not isinstance(args, transformers.TrainingArguments):
        return args
    seq2seq = isinstance(args, transformers.Seq2SeqTrainingArguments)
    kind = Seq2SeqTrainingArguments if seq2seq else TrainingArguments
    own = [name for name in (*known_fields(kind), "dtype") if name != "local_rank"]  # that is the launcher's
    values = {name: _plain(value) for name, value in _fields(args).items()}
    defaults = {name: _plain(value) for name, value in _fields(_default(args)).items()}
    switched = {name: values.pop(name) for name in SWITCHES if name in values}
    lacking = [
        name
        for name, value in values.items()
        if name in defaults
        and name not in (*own, *ALIASES, "local_rank")
        and value != defaults[name]
        and not is_done(name, value)
    ]
    if lacking:
        raise UsageError("; ".join(unknown_field(name, own) for name in lacking))
    return kind(**{name: value for name, value in values.items() if name in own}, **switched)


def _fields(args: transformers.TrainingArguments) -> dict[str, Any]:
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(args) if field.init}


def _default(args: transformers.TrainingArguments) -> transformers.TrainingArguments:
    """What transformers makes of no arguments but the folder and the device."""
    return transformers.Seq2SeqTrainingArguments(output_dir=args.output_dir, use_cpu=args.use_cpu)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
