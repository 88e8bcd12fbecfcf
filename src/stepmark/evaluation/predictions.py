"""Predictions of an evaluation: which of a model's outputs they are, and the arrays of all samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from stepmark.runtime.base import Runtime, map_tensors
from stepmark.training.model_labels import unwrapped

CACHE = "past_key_values"
PADDING = -100


class SampleRows(NamedTuple):
    """What `compute_metrics` gets: nests of arrays with a row, or lists with an item, per sample; None without any."""

    predictions: Any = None
    labels: Any = None
    inputs: Any = None
    losses: Any = None

    @classmethod
    def joined(cls, parts: Sequence[Sequence[Any]]) -> SampleRows:
        """The rows of several batches, or of one batch on all ranks, in order."""
        return cls(*(concatenate(list(column)) for column in zip(*parts, strict=True)))

    @classmethod
    def listed(cls, parts: Sequence[Sequence[Any]]) -> SampleRows:
        """The rows of several batches, as lists with an item for each batch."""
        columns = ([each for each in column if each is not None] for column in zip(*parts, strict=True))
        return cls(*(column or None for column in columns))

    @property
    def bytes(self) -> int:
        """Of all arrays."""
        return sum(getattr(leaf, "nbytes", 0) for leaf in tree_leaves(tuple(self)))

    def as_tensors(self) -> SampleRows:
        return SampleRows(*(tree_map_only(np.ndarray, torch.from_numpy, each) for each in self))


NO_ROWS = SampleRows()


def ignored_outputs(model: nn.Module) -> list[str]:
    """The outputs of a model that are not predictions, by its configuration, as in transformers."""
    config = getattr(unwrapped(model), "config", None)
    return list(getattr(config, "keys_to_ignore_at_inference", None) or [CACHE])


def predictions_of(outputs: Any, ignored: Sequence[str]) -> Any:
    """All outputs but the loss, caches and `ignored`: one alone, several as a tuple in the model's order, or None."""
    if isinstance(outputs, Mapping):
        outputs = tuple(value for key, value in outputs.items() if key not in ("loss", CACHE, *ignored))
    if isinstance(outputs, (tuple, list)):
        held = tuple(filter(holds_tensors, outputs))
        return (held[0] if len(held) == 1 else held) if held else None
    return getattr(outputs, "logits", outputs)


def holds_tensors(tree: Any) -> bool:
    """Whether a value is a tensor, or a nest of tuples, lists and mappings of tensors alone."""
    if isinstance(tree, (tuple, list, Mapping)):
        values = tree.values() if isinstance(tree, Mapping) else tree
        return bool(tree) and all(holds_tensors(value) for value in values)
    return isinstance(tree, Tensor)


def rows_on_host(tree: Any, rows: int | None, runtime: Runtime) -> Any:
    """The first `rows` rows (None: all) of each tensor or array in a nest, as numpy arrays; a 0-dim one is one row."""
    if isinstance(tree, Mapping):
        return {name: rows_on_host(value, rows, runtime) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return tuple(rows_on_host(value, rows, runtime) for value in tree)
    if not isinstance(tree, Tensor):
        return np.atleast_1d(tree)[:rows] if isinstance(tree, np.ndarray) else tree
    (on_host,) = runtime.to_host([tree.detach()])
    on_host = on_host.float() if on_host.dtype == torch.bfloat16 else on_host
    return np.atleast_1d(on_host.numpy())[:rows]


def labels_on_host(labels: Any, rows: int | None, runtime: Runtime) -> Any:
    """As `rows_on_host`. A list, of several labels too, has an item for each sample, of any shape: the boxes of an
    image, for example. The first `rows` items are returned whole."""
    if isinstance(labels, list):
        return map_tensors(labels[:rows], lambda each: runtime.to_host([each.detach()])[0].numpy())
    if isinstance(labels, tuple):
        return tuple(labels_on_host(each, rows, runtime) for each in labels)
    return rows_on_host(labels, rows, runtime)


def concatenate(arrays: list[Any]) -> Any:
    """Joins arrays, or nests of arrays, along the first dim; where other dims differ, shorter ones are padded with
    -100. Lists of samples are joined to one."""
    present = [array for array in arrays if array is not None]
    if not present:
        return None
    if isinstance(present[0], list):
        return [sample for each in present for sample in each]
    if isinstance(present[0], tuple):
        return tuple(concatenate([array[index] for array in present]) for index in range(len(present[0])))
    if isinstance(present[0], dict):
        return {name: concatenate([array[name] for array in present]) for name in present[0]}
    widest = tuple(max(sizes) for sizes in zip(*(array.shape[1:] for array in present), strict=True))
    filled = []
    for array in present:
        missing = [(0, wide - size) for wide, size in zip(widest, array.shape[1:], strict=True)]
        fits = array.shape[1:] == widest
        filled.append(array if fits else np.pad(array, [(0, 0), *missing], constant_values=PADDING))
    return np.concatenate(filled)
