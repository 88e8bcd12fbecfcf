"""Converts transformers' TrainingArguments, for scripts that make those."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import transformers

from stepmark.config.fields import field_names
from stepmark.config.training_fields import TrainingFields
from stepmark.config.transformers_defaults import known_fields
from stepmark.data.loader.collate import PadTo
from stepmark.errors import UsageError
from stepmark.trainer.training_arguments import Seq2SeqTrainingArguments, TrainingArguments

_TRAINERS = ("trl", "optimum", "sentence_transformers", "setfit")  # libraries with trainers of their own
_INSTEAD = "leave it out, and prepare train_dataset so; for chats use Conversations, or a recipe"


def converted(args: Any, kind: Any = None) -> Any:
    """Returns `args` as Stepmark's TrainingArguments where they are transformers' or a recipe's, those by default for
    None, and anything else as it is. `kind`: the class of arguments of a library's trainer, with fields of its own.

    Raises UsageError that names all fields which Stepmark lacks and which do not have their default value.
    """
    own = kind or TrainingArguments
    if args is None or isinstance(args, own):
        return own() if args is None else args
    if isinstance(args, TrainingFields):
        names = {*field_names(TrainingFields), *known_fields(TrainingArguments)}
        return own(**{name: getattr(args, name) for name in names if hasattr(args, name)})
    if not hasattr(args, "output_dir"):
        raise UsageError(f"args: should be TrainingArguments, and is a {type(args).__name__}; {_ORDER}")
    if not isinstance(args, transformers.TrainingArguments):
        return args
    others = _of_other_trainers(args)
    if others and kind is None:
        raise UsageError("; ".join(f"{name}: only {whose}'s trainers read it; {_INSTEAD}" for name, whose in others))
    seq2seq = isinstance(args, transformers.Seq2SeqTrainingArguments)
    kind = kind or (Seq2SeqTrainingArguments if seq2seq else TrainingArguments)
    values = {name: _plain(value) for name, value in _fields(args).items() if name != "local_rank"}  # the launcher's
    known = known_fields(kind)
    # What transformers makes of no arguments but the folder and the device.
    default = transformers.Seq2SeqTrainingArguments(output_dir=args.output_dir, use_cpu=args.use_cpu)
    defaults = {name: _plain(value) for name, value in _fields(default).items()}
    set_here = [
        name
        for name, value in values.items()
        if (name in known and (value, defaults.get(name)) != (None, None))  # what is unset keeps our default
        or (name in defaults and value != defaults[name])
    ]
    made = kind(**{name: values[name] for name in (*set_here, "use_cpu")})
    for name in vars(args).keys() - vars(default).keys() - set(known):  # a script's own, which its hooks read
        setattr(made, name, getattr(args, name))
    return made


def check_kinds(**arguments: Any) -> None:
    """Raises UsageError for an argument of the Trainer that stands where another one belongs."""
    for name, value in arguments.items():
        wanted, fits = _KINDS[name]
        if value is not None and not fits(value):
            raise UsageError(f"{name}: should be {wanted}, and is a {type(value).__name__}; {_ORDER}")


def _is_dataset(value: Any) -> bool:
    return not isinstance(value, str) and (hasattr(value, "__getitem__") or hasattr(value, "__iter__"))


_ORDER = "the order is Trainer(model, args, data_collator, train_dataset, eval_dataset, …)"
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "data_collator": ("a function", lambda given: callable(given) or isinstance(given, PadTo)),
    "train_dataset": ("a dataset", _is_dataset),
    "eval_dataset": ("a dataset", _is_dataset),
    "callbacks": ("a list", lambda given: isinstance(given, Sequence) and str not in map(type, given)),
    "optimizers": ("an optimizer, a schedule", lambda given: _is_dataset(given) and not hasattr(given[0], "get_lr")),
}


def _fields(args: transformers.TrainingArguments) -> dict[str, Any]:
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(args) if field.init}


def _of_other_trainers(args: transformers.TrainingArguments) -> list[tuple[str, str]]:
    """What was set of the fields that another library adds to transformers' for its own trainers, and whose it is."""
    known = (*field_names(transformers.Seq2SeqTrainingArguments), *known_fields(TrainingArguments))
    found = []
    for field in dataclasses.fields(args):
        kinds = [kind for kind in type(args).__mro__ if field.name in inspect.get_annotations(kind)]
        whose = kinds[-1].__module__.partition(".")[0] if kinds else ""
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if whose in _TRAINERS and field.name not in known and getattr(args, field.name, default) != default:
            found.append((field.name, whose))
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
