"""Versions of the software that decides what a run computes, without importing any of it."""

from __future__ import annotations

import functools
import platform
from importlib.metadata import PackageNotFoundError, version

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
