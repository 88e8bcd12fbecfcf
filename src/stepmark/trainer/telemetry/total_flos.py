"""`total_flos`: a run's floating-point operations as transformers counts them, six per parameter and token."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from stepmark.data.batch import StepBatch
from stepmark.parallel.pipeline.staged_model import complete_size
from stepmark.training.model_labels import unwrapped


class TotalFlos:
    """Counts the operations of steps. Parameters of embeddings do not count, padding does, as in transformers; a model
    that is not one of transformers has none.

    Args:
        model: The model, of which this rank may have a part.
        data_parallel_size: Ranks that train on different samples, each as many as this one.
    """

    def __init__(self, model: nn.Module, data_parallel_size: int) -> None:
        self._model: Any = unwrapped(model)
        self._ranks = data_parallel_size

    @functools.cached_property
    def _per_token(self) -> int:
        if not hasattr(self._model, "num_parameters"):
            return 0
        return 6 * complete_size(self._model).outside_embeddings

    def of(self, batch: StepBatch) -> float:
        """The operations of a step on all ranks."""
        if not self._per_token:
            return 0.0
        name = getattr(self._model, "main_input_name", "input_ids")
        inputs = [each.inputs for each in batch if isinstance(each.inputs, Mapping)]
        tokens = sum(each[name].numel() for each in inputs if isinstance(each.get(name), Tensor))
        return float(self._per_token * tokens * self._ranks)
