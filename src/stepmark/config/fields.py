"""How a recipe's field is declared: with its type, and in `Annotated` its values; what is said of it is in fields.toml.

    lora_r: Annotated[int, at_least(1)] = 8

Checks of values, `--help`, the JSON schema, comments of starter recipes, the documentation's tables and the docstrings'
`Args` follow from these two. A dataclass of such fields stays one that transformers' HfArgumentParser reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from stepmark.config.refusals import refusals
from stepmark.errors import UsageError
from stepmark.filesystem.local_paths import SCHEMES, WANTED, is_address


class Help(NamedTuple):
    """A line about a field, a value for it as in a recipe, what its default stands for, and further sentences; and the
    section of `--help` that it is in."""

    section: str = ""
    text: str = ""
    example: str = ""
    default: str | None = None
    more: str = ""


@functools.cache
def _helps() -> dict[str, Help]:
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {name: Help(section, **texts) for section, fields in table.items() for name, texts in fields.items()}


REFERENCE = "https://stepmark.github.io/stepmark/reference"  # below pyproject.toml's Documentation
OR_BOOL = object()  # at a field that may also be true or false: HfArgumentParser reads no union with bool


@dataclass(frozen=True)
class Values:
    """Which values a field accepts, in words and as keywords of a JSON schema."""

    accept: Callable[[Any], bool] = dataclasses.field(compare=False)
    wanted: str
    schema: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)


def at_least(least: int) -> Values:
    return Values(lambda value: value >= least, f"at least {least}", {"minimum": least})


def one_of(*choices: str) -> Values:
    return Values(lambda value: value in choices, "", {"enum": [*choices]})


FINITE = Values(math.isfinite, "a finite number")
ABOVE_0 = Values(lambda value: value > 0, "above 0", {"exclusiveMinimum": 0})
FRACTION = Values(lambda value: 0 <= value < 1, "from 0 to below 1", {"minimum": 0, "exclusiveMaximum": 1})
_ADDRESSES = tuple(f"{each}://" for each in SCHEMES)
LOCAL = Values(lambda value: not is_address(value), WANTED)
BUCKET = Values(lambda value: value.startswith(_ADDRESSES), "an address: s3://, gs:// or az://")
PLACE = Values(
    lambda value: not is_address(value) or str(value).startswith(_ADDRESSES), "a path, s3://, gs:// or az://"
)
SECONDS = Values(lambda value: 0 < value < math.inf, "a number of seconds above 0", {"exclusiveMinimum": 0})
INTERVAL = Values(
    lambda value: 0 < value < 1 or (value >= 1 and value % 1 == 0),
    "a whole number of steps, or a fraction below 1",
    {"exclusiveMinimum": 0},
)

_NAMES = {  # in messages, and in a JSON schema
    bool: ("true or false", "boolean"),
    int: ("a whole number", "integer"),
    float: ("a number", "number"),
    str: ("text", "string"),
    dict: ("a mapping", "object"),
    list: ("a list", "array"),
    type(None): ("nothing", "null"),
}


@dataclass(frozen=True)
class Field:
    """A field as it is declared. `types` are those that a recipe may have for it."""

    name: str
    types: tuple[Any, ...]
    default: Any
    values: tuple[Values, ...]
    help: Help

    @property
    def type_name(self) -> str:
        names = (getattr(kind, "__name__", "") if not typing.get_args(kind) else str(kind) for kind in self.types)
        return " | ".join("None" if name == "NoneType" else name for name in names)

    @property
    def default_text(self) -> str:
        """The default as a recipe has it, or what it stands for."""
        plain = str(self.default).lower() if isinstance(self.default, bool) else str(self.default)
        return self.help.default or ("unset" if self.default is None else plain)

    @property
    def choices(self) -> list[str]:
        return next((each.schema["enum"] for each in self.values if "enum" in each.schema), [])

    def checked(self, value: Any, name: str | None = None) -> Any:
        """Returns `value` as the type of the field. Raises UsageError that names it, or `name`."""
        try:
            return self._checked(value, name or self.name)
        except UsageError as error:
            raise UsageError(f"{error}{described_at(self.name)}") from None

    def _checked(self, value: Any, name: str) -> Any:
        value = convert(name, value, self.types)
        for values in self.values if value is not None or self.default is not None else ():
            if value is None or not values.accept(value):
                if instead := refusals("gone").get(f"{name}: {value}"):
                    raise UsageError(f"{name}: {value} is gone; {instead}")
                if self.choices:
                    listed = f"{'one of ' if len(self.choices) > 1 else ''}{', '.join(self.choices)}"
                    raise UsageError(f"{name}: {value!r} is unknown; choose {listed}")
                raise UsageError(f"{name}: should be {values.wanted}, and is {value!r}")
        return value

    def schema(self) -> dict[str, Any]:
        names = [_NAMES[typing.get_origin(kind) or kind][1] for kind in self.types]
        found: dict[str, Any] = {"type": names[0] if len(names) == 1 else names, "default": self.default}
        for values in self.values:
            found |= values.schema
        if "enum" in found and "null" in names:
            found["enum"] = [*found["enum"], None]
        description = f"{self.help.text}. {self.help.more}".strip()
        return {**found, "description": f"{description} Example: {self.name}: {self.help.example}"}


def described_at(*names: str) -> str:
    """The end of an error: where the first of these fields is described. Empty if none of them is a recipe's."""
    found = next((name for name in names if name in _helps()), None)
    return f"; see {REFERENCE}/fields/#{found}" if found else ""


@functools.cache
def fields_of(kind: type) -> Mapping[str, Field]:
    hints = typing.get_type_hints(kind, include_extras=True)
    found: dict[str, Field] = {}
    for field in dataclasses.fields(kind):
        said: tuple[Any, ...] = getattr(hints[field.name], "__metadata__", ())
        hint = typing.get_args(hints[field.name])[0] if said else hints[field.name]
        union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        kinds = (*((bool,) if OR_BOOL in said else ()), *(typing.get_args(hint) if union else (hint,)))
        values = tuple(each for each in said if isinstance(each, Values))
        found[field.name] = Field(field.name, kinds, field.default, values, _helps().get(field.name, Help()))
    return found


def field_names(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def changed(values: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """The values that are not the defaults of the fields of `kind`. Steps are whole numbers, as they were given: only
    fractions of a run are not."""
    found = {}
    for name, field in fields_of(kind).items():
        value = values[name]
        whole = name.endswith("_steps") and isinstance(value, float) and value.is_integer()
        if value != field.default:
            found[name] = int(value) if whole else value
    return found


def check_fields(made: Any, kind: type, given: Mapping[str, Any] | None = None) -> None:
    """Sets the fields that the dataclass `kind` declares to their values in `made`, or in `given`, converted to their
    types; text with `~` in front is a path.

    Raises UsageError that names the first field whose value is of another type or out of range.
    """
    for name, field in fields_of(kind).items():
        value = field.checked(getattr(made, name) if given is None else given[name])
        object.__setattr__(made, name, os.path.expanduser(value) if isinstance(value, str) else value)


def refuse(contradictions: Iterable[str]) -> None:
    """Raises UsageError for the first one."""
    for message in contradictions:
        raise UsageError(message)


def convert(name: str, value: Any, accepted: tuple[Any, ...]) -> Any:
    """Returns `value` as one of the types `accepted`. A whole number is accepted as a number, and so is text such as
    "1e-4"; a tuple as a list, a path as text, and the text of true and false where text is accepted as well.

    Raises UsageError that names the field.
    """
    if value is None and type(None) in accepted:
        return None
    if bool in accepted and str in accepted and isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    for kind in accepted:
        origin = typing.get_origin(kind) or kind
        if origin is float and isinstance(value, (int, str)) and not isinstance(value, bool):
            with contextlib.suppress(ValueError, OverflowError):
                return float(value)
        if origin is int and isinstance(value, float) and value.is_integer():
            return int(value)
        if origin is list and isinstance(value, tuple):
            return list(value)
        if origin is str and isinstance(value, os.PathLike):
            return os.fspath(value)
        if isinstance(value, origin) and (origin is bool or not isinstance(value, bool)):
            return value
    wanted = " or ".join(_NAMES[typing.get_origin(kind) or kind][0] for kind in accepted)
    raise UsageError(f"{name}: should be {wanted}, and is {value!r}")


Owner = TypeVar("Owner", bound=type)


def documented(kind: Owner) -> Owner:
    """Class decorator: a line about each field, as `Args` of the docstring."""
    lines = ["", "", "    Args:"]
    for name, field in fields_of(kind).items():
        text = f"{field.help.text}. {field.help.more}".rstrip()
        lines.append(f"        {name}: {text} Default: {field.default_text}.")
    kind.__doc__ = (kind.__doc__ or "").rstrip() + "\n".join(lines)
    return kind
