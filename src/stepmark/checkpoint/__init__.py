"""The checkpoint engine: see `Checkpointer`. Names load what they need when they are used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepmark.checkpoint import dcp as dcp
    from stepmark.checkpoint.checkpointer import Checkpointer as Checkpointer
    from stepmark.checkpoint.format.manifest import Manifest as Manifest
    from stepmark.checkpoint.format.manifest import read_manifest as read_manifest
    from stepmark.checkpoint.operation import SaveHandle as SaveHandle
    from stepmark.checkpoint.retention_policies import KeepBest as KeepBest
    from stepmark.checkpoint.retention_policies import KeepEachInterval as KeepEachInterval
    from stepmark.checkpoint.retention_policies import KeepEvery as KeepEvery
    from stepmark.checkpoint.retention_policies import KeepLast as KeepLast
    from stepmark.checkpoint.retention_policies import Retention as Retention
    from stepmark.checkpoint.retention_policies import Saved as Saved

_HOMES = {
    "Checkpointer": "checkpointer",
    "SaveHandle": "operation",
    "dcp": "dcp",
    **dict.fromkeys(("Manifest", "read_manifest"), "format.manifest"),
    **dict.fromkeys(("KeepBest", "KeepEachInterval", "KeepEvery", "KeepLast"), "retention_policies"),
    **dict.fromkeys(("Retention", "Saved"), "retention_policies"),
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f".{_HOMES[name]}", __name__)
    return module if name == _HOMES[name] else getattr(module, name)
