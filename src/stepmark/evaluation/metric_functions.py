"""Custom functions that a command line names as `module:function`."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from stepmark.errors import MetricsError, UsageError
from stepmark.filesystem.error_advice import explained

PREPROCESS = "preprocess_logits_for_metrics"


def load_metrics(name: str | None, flag: str) -> dict[str, Any]:
    """The metrics function `module:function`, given as `flag`, as arguments of `evaluate` and the Trainer:
    `compute_metrics`, and `preprocess_logits_for_metrics` if its module has a function of that name, of which only the
    result is copied to the host. None of them without a name. Raises UsageError if there is no such function."""
    if name is None:
        return {}
    function = load_function(name, flag)
    return {"compute_metrics": function, PREPROCESS: getattr(sys.modules[name.partition(":")[0]], PREPROCESS, None)}


def load_function(name: str, flag: str) -> Callable[..., Any]:
    """The function `module:function`; the module is searched for in the current folder first, and what it imports
    later there last. Errors of the function are raised as MetricsError with its name.

    Raises UsageError, which names `flag`, where there is none.
    """
    module_name, separator, attribute = name.partition(":")
    if not separator or not module_name or not attribute:
        raise UsageError(f"{flag}: {name!r} should be a module and a function in it, as my_module:my_function")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing the user's module may raise anything
        what = f"{module_name} cannot be imported: {describe(error)}"
        if isinstance(error, ModuleNotFoundError) and error.name and module_name.startswith(error.name):
            what = f"no module {module_name!r} was found; run the command in its folder, or install it"
        raise UsageError(f"{flag}: {what}") from error
    finally:
        sys.path.remove(here)
        sys.path += [] if here in sys.path else [here]
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UsageError(f"{flag}: {module_name} has no function {attribute!r}")
    return _with_errors_named(function, name)


def _with_errors_named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        with explained(lambda error: MetricsError(f"{name} raised {describe(error)}")):
            return function(*arguments, **options)

    call.__qualname__ = name
    return call


def describe(error: BaseException) -> str:
    """The kind and the first line of an error."""
    line = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
