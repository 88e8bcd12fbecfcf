"""The names, order and shapes of a model's parameters, from its Hugging Face config alone."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from stepmark.sharding.layout import Shape, row_major_strides

CONFIG = "config.json"


@dataclass(frozen=True)
class ModelOutline:
    """A model without values.

    Args:
        config: The contents of config.json.
        architecture: The class's name.
        parameters: Names to shapes, in the order of `named_parameters()`; of tied ones the first name.
        state: Names in the state dict to shapes, without those of tied tensors that are not stored.
        tied: Names of tied tensors to the names they are stored under.
        layer_norms: Parameters of torch's LayerNorm.
        frozen: Parameters that the class makes without a gradient.
        optional: Patterns of names that old versions of the model stored, and that it does not need.
        written: How transformers writes what it changes, as `stepmark.checkpoint.written_form` has it.
        live: Of an adapter, whose `parameters` and `state` have the names in PEFT's file: those in the PeftModel.
        identity: Of an adapter, what a run's identity has of it.
    """

    config: dict[str, Any]
    architecture: str
    parameters: dict[str, Shape]
    state: dict[str, Shape]
    tied: dict[str, str] = field(default_factory=dict)
    layer_norms: frozenset[str] = frozenset()
    optional: tuple[str, ...] = ()
    frozen: frozenset[str] = frozenset()
    written: dict[str, Any] = field(default_factory=dict)
    live: dict[str, str] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def saved(self) -> dict[str, str]:
        """Names in the files that transformers writes to those in the model, where it changes only the name."""
        return {name: own for name, own in self.written.items() if isinstance(own, str)}

    @cached_property
    def joined(self) -> dict[str, tuple[str, Shape]]:
        """Names in those files of tensors that are parts of one in the model, such as the weights of one expert: its
        name, and where the part begins in it. The part has its dims in their order, without the first perhaps."""
        found, sizes = {}, Counter[str]()
        for name, (own, start, lengths, strides) in ((n, v) for n, v in self.written.items() if isinstance(v, list)):
            steps = row_major_strides(self.state[own]) if isinstance(own, str) else ()
            if steps[-len(lengths) :] == tuple(strides):
                found[name] = own, tuple(start // step % n for step, n in zip(steps, self.state[own], strict=True))
                sizes[own] += math.prod(lengths)
        return {name: part for name, part in found.items() if sizes[part[0]] == math.prod(self.state[part[0]])}
