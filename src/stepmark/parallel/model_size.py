"""Numbers of a complete model, whatever part of it a rank holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from stepmark.sharding.layout import layout_of


@dataclass(frozen=True)
class ModelSize:
    """Sums over the parameters of a model, each counted once, over all shards.

    Attributes:
        elements: Their elements.
        trained: Elements of those that require gradients.
        nbytes: Their bytes, in their own dtypes.
        multiplied: Elements of those that are used in matrix products: an embedding used only for lookup is excluded,
            one tied to the head is included.
        outside_embeddings: Elements of those that are not an embedding's, whatever else it is tied to.
    """

    elements: int
    trained: int
    nbytes: int
    multiplied: int
    outside_embeddings: int

    @classmethod
    def of(cls, model: nn.Module) -> ModelSize:
        """The size of a model that was not cut into pipeline stages; it may be sharded otherwise."""
        sizes = {id(parameter): _numel(parameter) for parameter in model.parameters()}
        nbytes = sum(sizes[id(parameter)] * parameter.element_size() for parameter in model.parameters())
        looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        used = {
            id(parameter)
            for module in model.modules()
            if not isinstance(module, nn.Embedding)
            for parameter in module.parameters(recurse=False)
        }
        multiplied = sum(size for key, size in sizes.items() if key not in looked_up - used)
        trained = sum(sizes[id(parameter)] for parameter in model.parameters() if parameter.requires_grad)
        outside = sum(size for key, size in sizes.items() if key not in looked_up)
        return cls(sum(sizes.values()), trained, nbytes, multiplied, outside)


def _numel(parameter: nn.Parameter) -> int:
    layout = layout_of(parameter)
    return parameter.numel() if layout is None else math.prod(layout.shape)
