"""Arguments of transformers' TrainingArguments that Stepmark lacks: only their default values are accepted."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

from stepmark.config.fields import field_names
from stepmark.config.quiet_libraries import quiet_libraries
from stepmark.config.refusals import refusals
from stepmark.config.unknown_fields import unknown_fields
from stepmark.errors import UsageError


def _is_count(value: Any) -> bool:
    return value is None or (type(value) is int and value > 0)


# Arguments that may ask for what is done in any case, and which of their values do.
DONE_ANYWAY: dict[str, Callable[[Any], bool]] = {
    "eval_accumulation_steps": lambda value: value is not None,  # predictions leave the device after each batch
    "ddp_find_unused_parameters": lambda value: True,  # parameters without a gradient are allowed
    "ddp_broadcast_buffers": lambda value: value is False,  # each rank has its own; checkpoints hold the first rank's
    "ddp_static_graph": lambda value: True,  # the order of gradients need not be declared
    "ddp_backend": lambda value: value in ("gloo", "nccl", "xla"),  # the backend is that of the device
    "no_logging_nan_inf_filter": lambda value: True,  # HfArgumentParser's option; losses are unfiltered by default
    "dataloader_pin_memory": lambda value: value is False,
    "dataloader_persistent_workers": lambda value: value is True,  # workers live for an epoch
    "dataloader_prefetch_factor": _is_count,
    "torch_empty_cache_steps": _is_count,
    "eval_use_gather_object": lambda value: True,
}

LATE = "_late"  # the attribute with fields that HfArgumentParser leaves alone, for `__post_init__`
_ABSENT: dict[str, dataclasses.Field[Any]] = {}  # fields that `options_of_transformers` has made

# Other names of transformers: our field, the value that a switch means, and our field's default.
RENAMED: dict[str, tuple[str, Any, Any]] = {
    "use_cpu": ("device", "cpu", "auto"),
    "enable_jit_checkpoint": ("save_on_signal", True, None),
    "activation_checkpointing": ("gradient_checkpointing", None, False),
    "activation_checkpointing_kwargs": ("gradient_checkpointing_kwargs", None, None),
}


@functools.cache
def transformers_class() -> Any:
    """transformers' TrainingArguments, also where a program puts another class in its place later."""
    quiet_libraries()
    from transformers import TrainingArguments

    return TrainingArguments


@functools.cache
def transformers_defaults() -> dict[str, Any]:
    """The defaults of transformers' TrainingArguments by name. Imports transformers, which takes seconds."""
    fields = [field for field in dataclasses.fields(transformers_class()) if field.init]
    missing = dataclasses.MISSING
    made = {field.name: field.default_factory() for field in fields if field.default_factory is not missing}
    made["no_logging_nan_inf_filter"] = False
    return {field.name: None if field.default is missing else field.default for field in fields} | made


class AcceptingDefaults(type):
    """Makes dataclasses, subclasses of them included, whose constructor ignores arguments that it lacks, if they have
    the value that they have in transformers by default, or ask for what is done anyway (`DONE_ANYWAY`). Any other value
    is a UsageError that names the argument. `RENAMED` ones set other fields. What was ignored can be read
    where the class has the fields of `options_of_transformers`. The constructor also takes fields that are declared
    with `init=False`, so that `HfArgumentParser` makes no options of them."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        late = {field.name: options.pop(field.name) for field in fields if not field.init and field.name in options}
        known = known_fields(cls)
        made: Any = cls.__new__(cls, *args, **options)  # type: ignore[arg-type]
        vars(made)[LATE] = late
        used = without_defaults(_renamed(options, known), known)
        vars(made).update({name: value for name, value in options.items() if is_absent(cls, name)})
        made.__init__(*args, **used)
        return made


def options_of_transformers(base: type) -> type:
    """A dataclass with the arguments of transformers that `base` lacks, as a second base of a class that redeclares
    those that it has. So `HfArgumentParser` makes an option of each, whose value is accepted or refused as in a call.
    """
    hints = typing.get_type_hints(transformers_class())
    fields = [
        (
            name,
            hints.get(name, bool),
            dataclasses.field(default=value, metadata={"help": refusals("transformers").get(name, "")}),
        )
        for name, value in transformers_defaults().items()
        if name not in field_names(base) and not isinstance(value, (list, dict))
    ]
    made = dataclasses.make_dataclass("TransformersOptions", fields)
    _ABSENT.update({field.name: field for field in dataclasses.fields(made)})
    return made


def known_fields(kind: Any) -> list[str]:
    """The arguments of the constructor of `kind` that have an effect."""
    return [field.name for field in dataclasses.fields(kind) if field.init and not is_absent(kind, field.name)]


def is_absent(kind: Any, name: str) -> bool:
    """Whether `kind` has a field for an argument of transformers that Stepmark lacks."""
    return name in _ABSENT and kind.__dataclass_fields__.get(name) is _ABSENT[name]


def set_absent(args: Any, name: str, value: Any) -> None:
    """Sets such a field. Raises UsageError unless `value` is its default, or asks for what is done anyway."""
    if LATE in vars(args) and _equal(value, transformers_defaults()[name]):
        return  # the constructor's default, after what it was given
    own, meaning, _ = RENAMED.get(name, ("", None, None))
    if own and meaning is None:
        setattr(args, own, value)
        return
    if not own:
        without_defaults({name: value}, ())
    elif value != getattr(args, name):
        if not value:
            raise UsageError(f"{name}: is set as {own}; set that")
        setattr(args, own, meaning)
    vars(args)[name] = value


def _renamed(options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The options by the names that they have here. Raises UsageError where two contradict each other."""
    result = dict(options)
    for name, (own, meaning, default) in RENAMED.items():
        given = None if name in known else result.pop(name, None)
        if not given:
            continue
        value = given if meaning is None else meaning
        if getattr(result.get(own), "type", result.get(own)) not in (None, default, value):
            raise UsageError(f"{name}, {own}: {name} means {own}: {value}, not {result[own]}; leave one out")
        result[own] = value
    return result


def without_defaults(options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The `options` that are `known`. Raises UsageError that names all others which are no fields of transformers, or
    which neither have their default value nor ask for what is done anyway."""
    done = [name for name, value in options.items() if name in DONE_ANYWAY and DONE_ANYWAY[name](value)]
    others = {name: value for name, value in options.items() if name not in (*known, *done)}
    if others:
        defaults = transformers_defaults()
        refused = [name for name, value in others.items() if name not in defaults or not _equal(value, defaults[name])]
        if refused:
            raise UsageError(unknown_fields(refused, known))
    return {name: value for name, value in options.items() if name in known}


def _equal(value: Any, default: Any) -> bool:
    """Whether a value is the default. None, and an empty list or mapping, all say that nothing is set."""
    return bool(value == default) or (value in (None, "", [], {}) and default in (None, "", [], {}))
