"""Arguments of transformers' TrainingArguments that Stepmark lacks: only their default values are accepted."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any

from stepmark.config.unknown_field_message import unknown_field
from stepmark.errors import UsageError


class AcceptingDefaults(type):
    """Makes dataclasses, subclasses of them included, whose constructor ignores arguments that it lacks, if they have
    the value that they have in transformers by default. Any other value is a UsageError that names the argument."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        known = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
        return super().__call__(*args, **without_defaults(options, known))


def without_defaults(options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The `options` that are `known`.

    Raises:
        UsageError: Another one is neither that of a transformers field nor has its default value.
    """
    others = {name: value for name, value in options.items() if name not in known}
    if others:
        defaults = transformers_defaults()
        for name, value in others.items():
            if name not in defaults or not _equal(value, defaults[name]):
                raise UsageError(unknown_field(name, known))
    return {name: value for name, value in options.items() if name in known}


@functools.cache
def transformers_defaults() -> dict[str, Any]:
    """The defaults of transformers' TrainingArguments by name. Imports transformers, which takes seconds."""
    from stepmark.config.quiet_libraries import quiet_libraries

    quiet_libraries()
    from transformers import TrainingArguments

    return {field.name: _default(field) for field in dataclasses.fields(TrainingArguments) if field.init}


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _equal(value: Any, default: Any) -> bool:
    """Whether a value is the default. None, and an empty list or mapping, all say that nothing is set."""
    return bool(value == default) or (value in (None, "", [], {}) and default in (None, "", [], {}))
