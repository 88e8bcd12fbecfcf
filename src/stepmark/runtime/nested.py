"""Nests of dicts, lists and tuples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def map_tensors(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Applies `function` to every tensor of a nest; other leaves are unchanged."""
    if isinstance(tree, Tensor):
        return function(tree)
    if hasattr(tree, "items"):
        return {key: map_tensors(value, function) for key, value in tree.items()}
    if isinstance(tree, list):
        return [map_tensors(value, function) for value in tree]
    if isinstance(tree, tuple):
        values = [map_tensors(value, function) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    return tree
