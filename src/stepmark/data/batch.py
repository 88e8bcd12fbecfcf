"""A loader's output: the micro-batches of one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass of one rank.

    `inputs` is the collator's output, usually a dict of tensors [rows, …]. The first `rows` rows are samples; the
    others, and all if it is 0, are filler that keeps the shape: their integer labels are -100. `targets` is the number
    of labels in the loss, None if samples are counted instead. Until it is known whether the model shifts its labels,
    `targets` includes `first_targets`, the first labels of the rows; see `MicroBatchLoss.count`.
    """

    inputs: Any
    rows: int
    targets: int | None
    first_targets: int = 0


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
