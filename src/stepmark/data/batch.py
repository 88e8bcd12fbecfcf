"""What a loader yields: the micro-batches of one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stepmark.data.packing import IGNORED


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass of one rank.

    `inputs` is what the collator made, a dict of tensors [rows, …] as a rule. The first `rows` rows are samples; the
    others, and all where it is 0, only keep the shape: their labels are -100 where there are integer labels, and
    without such labels a loss has to be weighted by `rows`. `targets` is the number of labels that count, None without.
    """

    inputs: Any
    rows: int
    targets: int | None


@dataclass(frozen=True)
class StepBatch:
    """One optimizer step of one rank.

    `samples` is the number of samples in it over all ranks, `epoch` the position after it in epochs, and `state` the
    loader's state after it, for `DataLoader.load_state_dict`.
    """

    micro_batches: list[MicroBatch]
    samples: int
    epoch: float
    state: dict[str, Any]

    @property
    def ends_epoch(self) -> bool:
        """Whether this is the last step of its epoch."""
        return bool(self.state["samples"] == 0)

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.micro_batches)

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __getitem__(self, index: int) -> MicroBatch:
        return self.micro_batches[index]


def count_targets(labels: Tensor, causal_shift: bool) -> int:
    """The number of labels that count in a loss: those that are not -100.

    `labels` has any shape. With `causal_shift` the first of each row is no target: a causal model predicts
    labels[..., 1:] from what is before them. One-dimensional labels, one a row, have nothing to shift.
    """
    if causal_shift and labels.ndim > 1:
        labels = labels[..., 1:]
    return int((labels != IGNORED).sum())


def integer_labels(inputs: Any) -> Tensor | None:
    """The batch's `labels` where they are whole numbers of which -100 can be one; else None."""
    labels = inputs.get("labels") if isinstance(inputs, dict) else None
    if not isinstance(labels, Tensor) or labels.ndim == 0:
        return None
    signed = labels.dtype.is_signed and not labels.dtype.is_floating_point and not labels.dtype.is_complex
    return labels if signed else None
