"""Refuses names that Stepmark does not have, in recipes, flags and arguments, and says what was meant."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import inspect
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from stepmark.config.fields import REFERENCE, described_at
from stepmark.config.refusals import Origin, refusals
from stepmark.errors import UsageError

OF_RECIPES: tuple[Origin, ...] = ("elsewhere", "transformers", "run_clm")  # what a recipe may have by mistake
Owner = TypeVar("Owner", bound=type)

TYPING_ERROR = 0.85  # similarity from which a name counts as a typing error
HELP = "`stepmark train --help` lists all fields"


def unknown_fields(names: Collection[str], known: Collection[str], path: str | None = None) -> str:
    """One line that says that the `names`, in the recipe `path` or flags, are not fields, and what to do instead. For a
    single one it ends with where that is described."""
    told = [_unknown_field(name, known, f" in {path}" if path else "") for name in names]
    return "; ".join(message for message, _ in told) + (told[0][1] if len(told) == 1 else "")


def _unknown_field(name: str, known: Collection[str], where: str) -> tuple[str, str]:
    instead = refusals("elsewhere").get(name.replace("-", "_"))
    if instead is not None:
        return f"{name}: is not a Stepmark field{where}; {instead}", _described(name.replace("-", "_"), instead)
    instead = {**refusals("transformers"), **refusals("run_clm")}.get(name)
    close = difflib.get_close_matches(name, known, n=1, cutoff=TYPING_ERROR)
    if instead is None and close and not name.startswith(f"{close[0]}_"):
        return f"{name}: is not a field{where}; did you mean {close[0]}?", described_at(close[0])
    if instead is None and name in _transformers_fields():
        instead = f"leave it out; {HELP}"
    if instead is not None:
        told = f"{name}: is a transformers field that Stepmark does not support{where}; {instead}"
        return told, _described(name, instead)
    return f"{name}: is not a field{where}; {HELP}", ""


def _described(name: str, instead: str) -> str:
    """Where the first field in `instead` is described; of a name without one, its row among all old names."""
    listed = f"; see {REFERENCE}/old-names/#{name}" if any(name in refusals(origin) for origin in OF_RECIPES) else ""
    return described_at(*re.findall(r"\w+", instead)) or listed


def _transformers_fields() -> Collection[str]:
    """Read from the source of the installed transformers: importing it takes seconds."""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        return ()
    source = (Path(found.origin).parent / "training_args.py").read_text(encoding="utf-8")
    return set(re.findall(r"^    (\w+): .*=", source, flags=re.MULTILINE))


def export_message(name: str) -> str | None:
    """What a name of another package is called in `stepmark`; None for any other name."""
    instead = refusals("export").get(name)
    return instead and f"{name}: is not in stepmark; use {instead}; see {REFERENCE}/old-names/"


def explains_keywords(owner: Owner) -> Owner:
    """Class decorator: a keyword that `__init__` does not have raises UsageError, which says what to use instead."""
    original: Callable[..., None] = owner.__init__  # type: ignore[misc]
    known = [name for name in inspect.signature(original).parameters if name != "self"]

    @functools.wraps(original)
    def construct(self: Any, *args: Any, **keywords: Any) -> None:
        for name in sorted(set(keywords) - set(known)):
            instead = refusals("elsewhere").get(name)
            if keywords[name] is not None or instead is None:  # None says that nothing is set
                close = difflib.get_close_matches(name, known, n=1)
                instead = instead or (f"did you mean {close[0]}?" if close else f"it has {', '.join(known)}")
                raise UsageError(f"{type(self).__name__}: {name}: is not an argument; {instead}")
            del keywords[name]
        original(self, *args, **keywords)

    owner.__init__ = construct  # type: ignore[misc]
    return owner
