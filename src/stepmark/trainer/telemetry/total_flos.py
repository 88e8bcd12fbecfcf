"""`total_flos`: a run's floating-point operations as transformers counts them, six per parameter and token."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from stepmark.data.loader.batch import StepBatch
from stepmark.parallel.pipeline.staged_model import complete_size
from stepmark.training.model_labels import unwrapped


class TotalFlos:
    """Counts the operations of steps. Parameters of embeddings do not count, padding of samples does, as in
    transformers, and rows that only keep a batch's shape do not; a model that is not one of transformers has none.

    Args:
        model: The model, of which this rank may have a part.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = unwrapped(model)

    @functools.cached_property
    def _per_token(self) -> int:
        if not hasattr(self._model, "num_parameters"):
            return 0
        return 6 * complete_size(self._model).outside_embeddings

    def of(self, batch: StepBatch) -> float:
        """The operations of a step on all ranks, whose samples are on average as long as this one's."""
        if not self._per_token:
            return 0.0
        name = getattr(self._model, "main_input_name", "input_ids")
        made = [(each.rows, each.inputs[name]) for each in batch if _has_tensor(each.inputs, name)]
        rows = sum(count for count, _ in made)
        counts = [count if rows else len(tensor) for count, tensor in made]  # a rank may have filler alone
        if not sum(counts):
            return 0.0
        tokens = sum(count * tensor[0].numel() for count, (_, tensor) in zip(counts, made, strict=True))
        return float(self._per_token * tokens * batch.samples / sum(counts))


def _has_tensor(inputs: Any, name: str) -> bool:
    found = inputs.get(name) if isinstance(inputs, Mapping) else None
    return isinstance(found, Tensor) and found.dim() > 0 and len(found) > 0
