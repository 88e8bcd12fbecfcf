"""A loader's output: the micro-batches of one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass of one rank.

    `inputs` is the collator's output, usually a dict of tensors [rows, …], of `rows` samples. Where it is `filled`, the
    rows after the first `rows`, all if it is 0, are filler that keeps the shape: their integer labels are -100.
    Otherwise a collator may have made another number of rows of the samples. `targets` is the number of labels in the
    loss, None if samples are counted instead. Until it is known whether the model shifts its labels, `targets` includes
    `first_targets`, the first labels of the rows; see `MicroBatchLoss.count`.
    """

    inputs: Any
    rows: int
    targets: int | None
    first_targets: int = 0
    filled: bool = False


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


def rows_of(inputs: Any) -> int:
    """The rows of a batch: those of its first tensor that has any, otherwise 1."""
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    values = [values] if isinstance(values, Tensor) else values
    return next((len(each) for each in values if isinstance(each, Tensor) and each.ndim), 1)


class StepLoader(Protocol):
    """The steps of a run or an evaluation, epoch by epoch, with a position that can be saved; see `DataLoader`."""

    @property
    def steps_per_epoch(self) -> int: ...

    def ahead(self) -> Iterator[StepBatch]:
        """The steps from the position to the end of its epoch, without moving the position."""

    def state_dict(self) -> dict[str, Any]:
        """The position that the consumer has reached, as plain values; `samples` is 0 at the beginning of an epoch."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Moves to a position."""
