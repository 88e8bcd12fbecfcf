"""Arguments of transformers' TrainingArguments that Stepmark lacks: only their default values are accepted."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

from stepmark.config.unknown_field_message import unknown_field
from stepmark.errors import UsageError

# Arguments that ask for what is done in any case: whether a value is such a one, and what is done.
DONE_ANYWAY: dict[str, tuple[Callable[[Any], bool], str]] = {
    "eval_accumulation_steps": (lambda value: value is not None, "predictions leave the device after each batch"),
    "ddp_find_unused_parameters": (lambda value: True, "parameters without a gradient are allowed"),
    "ddp_static_graph": (lambda value: True, "the order of gradients need not be declared"),
    "ddp_backend": (lambda value: value in ("gloo", "nccl", "xla"), "the backend is that of the device"),
    "logging_nan_inf_filter": (lambda value: value is False, "losses are logged as they are"),
    "dataloader_pin_memory": (lambda value: value is False, "memory is not pinned"),
    "dataloader_prefetch_factor": (lambda value: value is None, "batches are prefetched"),
    "torch_empty_cache_steps": (lambda value: value is None, "the cache is left alone"),
    "eval_use_gather_object": (lambda value: True, "predictions are gathered as objects"),
}


LATE = "_late"  # the attribute with fields that HfArgumentParser leaves alone, for `__post_init__`
IGNORED = "_ignored"  # the attribute with arguments that were accepted and ignored

# Switches of transformers that are a value of another field here.
SWITCHES: dict[str, tuple[str, Any]] = {"use_cpu": ("device", "cpu"), "enable_jit_checkpoint": ("save_on_signal", True)}

# Newer names of transformers, which has both.
ALIASES = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}


class AcceptingDefaults(type):
    """Makes dataclasses, subclasses of them included, whose constructor ignores arguments that it lacks, if they have
    the value that they have in transformers by default, or ask for what is done anyway (`DONE_ANYWAY`). Any other value
    is a UsageError that names the argument. `SWITCHES` and `ALIASES` set other fields. What was ignored can be read as
    an attribute, as any argument of transformers can: one that was not given has its default value. The constructor
    also takes fields that are declared with `init=False`, so that `HfArgumentParser` makes no options of them."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        late = {field.name: options.pop(field.name) for field in fields if not field.init and field.name in options}
        known = [field.name for field in fields if field.init]
        made: Any = cls.__new__(cls, *args, **options)  # type: ignore[arg-type]
        vars(made)[LATE] = late
        named = _without_aliases(_without_switches(options, known))
        made.__init__(*args, **without_defaults(named, known))
        vars(made)[IGNORED] = {name: value for name, value in options.items() if name not in known}
        return made


def ignored_argument(args: Any, name: str) -> Any:
    """The value of an argument of transformers that is not a field of `args`: the one that was given, or its default.

    Raises:
        AttributeError: It is not an argument of transformers.
    """
    given = vars(args).get(IGNORED, {})
    if name in ALIASES:
        return getattr(args, ALIASES[name])
    if name in given:
        return given[name]
    if name.startswith("_") or name not in transformers_defaults():
        raise AttributeError(f"{type(args).__name__!r} object has no attribute {name!r}")
    return transformers_defaults()[name]


def check_ignored(args: Any, name: str, value: Any) -> bool:
    """Whether `name` is an argument of transformers that `args` lacks. Raises UsageError unless `value` is its default,
    or asks for what is done anyway."""
    known = [field.name for field in dataclasses.fields(args)]
    if name.startswith("_") or name in known or hasattr(type(args), name) or name not in transformers_defaults():
        return False
    without_defaults({name: value}, known)
    return True


def _without_switches(options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The options with the fields that `SWITCHES` stand for. Raises UsageError where two contradict each other."""
    result = dict(options)
    for switch, (name, value) in SWITCHES.items():
        if switch in known or not result.get(switch):
            continue
        del result[switch]
        if result.get(name) not in (None, "auto", value):
            raise UsageError(f"{switch}, {name}: {switch} means {name}: {value}, not {result[name]}; leave one out")
        result[name] = value
    return result


def _without_aliases(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options by the names that they have here. Raises UsageError where two names have different values."""
    result = {name: value for name, value in options.items() if name not in ALIASES}
    for name, own in ALIASES.items():
        value = options.get(name)
        if value is None:
            continue
        if own in result and result[own] not in (None, value):
            raise UsageError(f"{name}, {own}: they are the same, and are {value} and {result[own]}; leave one out")
        result[own] = value
    return result


def without_defaults(options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The `options` that are `known`.

    Raises:
        UsageError: Others are not transformers fields, or neither have their default value nor ask for what is done
            anyway. All are named.
    """
    others = {name: value for name, value in options.items() if name not in known and not is_done(name, value)}
    if others:
        defaults = transformers_defaults()
        refused = [name for name, value in others.items() if name not in defaults or not _equal(value, defaults[name])]
        if refused:
            raise UsageError("; ".join(unknown_field(name, known) for name in refused))
    return {name: value for name, value in options.items() if name in known}


@functools.cache
def transformers_defaults() -> dict[str, Any]:
    """The defaults of transformers' TrainingArguments by name. Imports transformers, which takes seconds."""
    from stepmark.config.quiet_libraries import quiet_libraries

    quiet_libraries()
    from transformers import Seq2SeqTrainingArguments

    # Of their own class, also where a program has put another one in its place.
    kind = next(each for each in Seq2SeqTrainingArguments.__mro__ if each.__name__ == "TrainingArguments")
    return {field.name: _default(field) for field in dataclasses.fields(kind) if field.init}


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def is_done(name: str, value: Any) -> bool:
    """Whether an argument asks for what is done anyway."""
    return name in DONE_ANYWAY and DONE_ANYWAY[name][0](value)


def _equal(value: Any, default: Any) -> bool:
    """Whether a value is the default. None, and an empty list or mapping, all say that nothing is set."""
    return bool(value == default) or (value in (None, "", [], {}) and default in (None, "", [], {}))
