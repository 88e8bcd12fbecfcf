"""A dataset without the columns that a model's forward does not take, as `remove_unused_columns` asks for."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from stepmark.data.loader.labels import LabelRule
from stepmark.errors import DataError
from stepmark.training.model_labels import unwrapped

# Labels that collators rename, and labels that were shifted already, which forwards take among their other arguments.
ALWAYS = ("label", "label_ids", "shift_labels")

logger = logging.getLogger("stepmark")
_told: set[tuple[str, str]] = set()


class ModelColumns:
    """The columns of a sample that reach a model: `names`."""

    def __init__(self, model: nn.Module, names: frozenset[str], *, others_read: bool) -> None:
        self._model = type(model).__name__
        self.names = names
        self._others_read = others_read

    @classmethod
    def of_model(cls, model: nn.Module, labels: LabelRule, *, others_read: bool = False) -> ModelColumns | None:
        """The arguments of the model's forward, and the labels; None, for all, where it takes any argument. The models
        of transformers take further arguments for their attention and loss only, which are not columns.

        `others_read`: a user's loss or collator may want the other columns, so dropping them is a warning.
        """
        inner = unwrapped(model)
        parameters = inspect.signature(inner.forward).parameters.values()
        named = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        takes_any = len(named) < len(parameters)
        if takes_any and not (named and isinstance(inner, PreTrainedModel)):
            return None
        return cls(inner, frozenset((*named, *labels.names, *ALWAYS)), others_read=others_read)

    def of(self, sample: Any) -> Any:
        """The sample, a mapping without the other columns, or anything else as it is.

        Raises:
            DataError: No column is left.
        """
        if not isinstance(sample, Mapping) or self.names.issuperset(sample):
            return sample
        used = {name: value for name, value in sample.items() if name in self.names}
        ignored = ", ".join(str(name) for name in sample if name not in self.names)
        if not used:
            raise DataError(
                f"the dataset's columns ({ignored}) are not among the arguments of {self._model}.forward; rename them, "
                "or set remove_unused_columns: false for a data_collator that reads them"
            )
        if (self._model, ignored) not in _told:  # once per process: each evaluation has a loader of its own
            _told.add((self._model, ignored))
            self._log(ignored)
        return used

    def _log(self, ignored: str) -> None:
        if self._others_read:
            logger.warning(
                "columns that %s.forward does not take are left out, also for compute_loss and data_collator: %s; set "
                "remove_unused_columns: false to keep them",
                self._model,
                ignored,
            )
        else:
            logger.info("columns that %s.forward does not take are ignored: %s", self._model, ignored)


class UsedColumns:
    """The samples of a dataset with the columns that reach a model."""

    def __init__(self, dataset: Any, columns: ModelColumns) -> None:
        self.dataset = dataset
        self._columns = columns

    @property
    def mixture_order(self) -> Any:
        """That of the dataset, if it is a mixture."""
        return getattr(self.dataset, "mixture_order", None)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self._columns.of(self.dataset[index])

    def __getitems__(self, indices: list[int]) -> list[Any]:
        fetch = getattr(self.dataset, "__getitems__", None)
        samples = [self.dataset[index] for index in indices] if fetch is None else fetch(indices)
        return [self._columns.of(sample) for sample in samples]
