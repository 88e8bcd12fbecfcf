"""A loader's output: the micro-batches of one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass of one rank.

    Attributes:
        inputs: The collator's output, usually a dict of tensors [rows, …].
        rows: Number of samples in it. A collator may have made another number of rows of them.
        targets: Number of labels in the loss; None: samples are counted instead.
        filled: The rows after the first `rows` (all if it is 0) are filler that keeps the shape, with labels -100.
    """

    inputs: Any
    rows: int
    targets: int | None
    filled: bool = False


_computed: ContextVar[MicroBatch | None] = ContextVar("computed", default=None)


@contextmanager
def computing(micro_batch: MicroBatch) -> Iterator[None]:
    """Inside the block, the model is called with this micro-batch."""
    token = _computed.set(micro_batch)
    try:
        yield
    finally:
        _computed.reset(token)


def is_computing() -> bool:
    """Whether the model is called with a micro-batch."""
    return _computed.get() is not None


def is_filler() -> bool:
    """Whether the model is called with a micro-batch that has no samples of this rank."""
    micro_batch = _computed.get()
    return micro_batch is not None and not micro_batch.rows


@dataclass(frozen=True)
class StepBatch:
    """One optimizer step of one rank.

    Attributes:
        samples: Number of samples in it, over all ranks.
        epoch: The position after it, in epochs.
        state: The loader's state after it, for `DataLoader.load_state_dict`.
    """

    micro_batches: list[MicroBatch]
    samples: int
    epoch: float
    state: dict[str, Any]

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.micro_batches)

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __getitem__(self, index: int) -> MicroBatch:
        return self.micro_batches[index]


def rows_of(inputs: Any) -> int:
    """The number of rows of a batch: that of its first tensor with dimensions, else 1."""
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


def note_masks(on_host: Any, placed: Any) -> None:
    """Notes at every attention mask [rows, length] on the device whether it masks anything, as the host has seen it."""
    for name, mask in on_host.items() if isinstance(on_host, Mapping) else ():
        if name.endswith("attention_mask") and isinstance(mask, Tensor) and mask.ndim == 2 and placed[name] is not mask:
            nothing, something = bool((mask == 1).all()), not bool(mask.all())
            placed[name].masks_nothing = (nothing if nothing != something else None), placed[name]._version


def known_to_mask_nothing(mask: Any) -> bool | None:
    """What `note_masks` has noted, as long as the mask was not written to; None where nothing is known."""
    known, version = getattr(mask, "masks_nothing", (None, None))
    return known if known is not None and mask._version == version else None
