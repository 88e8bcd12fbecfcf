"""Versions of the software that decides what a run computes, without importing any of it."""

from __future__ import annotations

import functools
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("stepmark", "torch", "torch_xla", "torch-neuronx", "libneuronxla", "neuronx-cc", "transformers")


def software_versions() -> dict[str, str]:
    """Version by name, of Python and of those of PACKAGES that are installed."""
    found = {name: text for name in PACKAGES if (text := installed_version(name)) is not None}
    return {**found, "python": platform.python_version()}


@functools.cache
def installed_version(package: str) -> str | None:
    """The version of an installed distribution; None where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def refused_peft() -> str | None:
    """What to do where the installed transformers refuses the installed peft; None where they work together.

    transformers states which peft it takes in a table of its own, not in its package's metadata.
    """
    from packaging.requirements import Requirement

    spec, peft, transformers = find_spec("transformers"), installed_version("peft"), installed_version("transformers")
    if spec is None or spec.origin is None or peft is None:
        return None
    table = (Path(spec.origin).parent / "dependency_versions_table.py").read_text()
    stated = re.search(r'"(peft[<>=!~].*)"', table)
    if stated is None or Requirement(stated[1]).specifier.contains(peft, prereleases=True):
        return None
    return (
        f"transformers {transformers} takes {stated[1]} only, and peft {peft} is installed; pip install '{stated[1]}', "
        f"or where that is not released yet 'transformers<{transformers}'"
    )
