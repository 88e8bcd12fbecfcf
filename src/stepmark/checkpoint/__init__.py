"""The checkpoint engine: see `Checkpointer`. Names load what they need when they are used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepmark.checkpoint import dcp
    from stepmark.checkpoint.checkpointer import Checkpointer
    from stepmark.checkpoint.format.manifest import Manifest, read_manifest
    from stepmark.checkpoint.operation import SaveHandle
    from stepmark.checkpoint.retention_policies import KeepBest, KeepEachInterval, KeepEvery, KeepLast, Retention, Saved

_HOMES = {
    "Checkpointer": "checkpointer",
    "SaveHandle": "operation",
    "dcp": "dcp",
    **dict.fromkeys(("Manifest", "read_manifest"), "format.manifest"),
    **dict.fromkeys(("KeepBest", "KeepEachInterval", "KeepEvery", "KeepLast"), "retention_policies"),
    **dict.fromkeys(("Retention", "Saved"), "retention_policies"),
}

__all__ = [
    "Checkpointer",
    "KeepBest",
    "KeepEachInterval",
    "KeepEvery",
    "KeepLast",
    "Manifest",
    "Retention",
    "SaveHandle",
    "Saved",
    "dcp",
    "read_manifest",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f".{_HOMES[name]}", __name__)
    return module if name == _HOMES[name] else getattr(module, name)
