"""Data loaders that a user's Trainer returns: their batches, in their own order, as optimizer steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, IterableDataset, Sampler

from stepmark.data.loader.batch import MicroBatch, StepBatch, rows_of
from stepmark.data.loader.fetcher import random_states, seeded_generators, set_random_states
from stepmark.data.loader.labels import LabelRule
from stepmark.data.loader.loader import DataLoader
from stepmark.data.loader.order import BatchLayout
from stepmark.data.loader.own_state import changed_state, is_same, own_state, parts_of, set_own_state
from stepmark.data.loader.stream_loader import StreamLoader, whole
from stepmark.errors import CheckpointMismatch, DataError, UsageError
from stepmark.runtime.base import map_tensors

ORDER = "loader-1"  # in the position's field `order`: that of a loader that the Trainer did not make

logger = logging.getLogger("stepmark")


class PlainBatches:
    """The Trainer's loader with the interface of PyTorch's: a length, a dataset, and this rank's batches.

    Each iteration is over the first epoch, and does not move the position of `loader`. Where it `evaluates`, all ranks
    get as many batches, also where one lacks samples, and it is `iterated`, with the `rows` of all ranks in this turn.
    """

    iterated: Any = None  # such a loader, or one that was prepared

    def __init__(self, loader: DataLoader, *, evaluates: bool = False) -> None:
        self.loader, self.evaluates = loader, evaluates
        self.dataset = loader.dataset
        self.batch_size = loader.layout.batch_size

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("collate_fn", "generator", "sampler", "batch_sampler", "worker_init_fn"):
            raise UsageError(
                f"{name}: has no effect on the Trainer's loader; set data_collator, or return a loader of your own"
            )
        super().__setattr__(name, value)

    def __len__(self) -> int:
        return self.loader.steps_per_epoch * self.loader.layout.accumulation * len(self.loader.ranks)

    def __iter__(self) -> Iterator[Any]:
        try:
            for step in self.loader.again().ahead():
                if self.evaluates:
                    PlainBatches.iterated, self.rows = self, step.samples
                for each in step:
                    if each.rows or self.evaluates:
                        map_tensors(each.inputs, lambda tensor: setattr(tensor, "of_part", True))
                        yield each.inputs
        finally:
            if PlainBatches.iterated is self:
                PlainBatches.iterated = None


@dataclass(eq=False)
class GivenLoader:
    """An iterable of batches as the loader of a training run or an evaluation.

    The ranks take its batches in turn, as with accelerate, unless its sampler already shards the data. Every rank
    therefore iterates all of it with the same random numbers: Python's, numpy's and PyTorch's CPU generators are seeded
    for each epoch and restored after each batch. The position is the number of batches taken in an epoch. On resuming,
    `state_dict` and `load_state_dict` are used if the iterable has them; otherwise batches are skipped.

    Args:
        given: A re-iterable of batches on the host, with or without a length.
        rank, world_size: Of data parallelism; or the range of logical ranks that this process hosts, and their number.
        accumulation: Batches of a step and rank.
        max_steps: Steps of the run, for a loader without a length; default None: it needs one.
        fixed_shape: Pad smaller batches to the size of the first, with rows whose labels are ignored, where the loss
            has labels.
        whole_turns: Leave out the last batches of an epoch that are too few for all ranks, as accelerate's loaders with
            `drop_last` do: losses may take other ranks' samples as negatives.
    """

    given: Any
    _: KW_ONLY
    rank: int | range
    world_size: int
    labels: LabelRule
    accumulation: int = 1
    seed: int = 0
    max_steps: int | None = None
    fixed_shape: bool = False
    whole_turns: bool = False

    def __post_init__(self) -> None:
        loader, rank = self.given, self.rank
        if not hasattr(loader, "__iter__"):
            raise UsageError(f"a loader has to be iterable, and {type(loader).__name__} is not; return a DataLoader")
        sharded = is_sharded(loader)
        ranks = rank if isinstance(rank, range) else range(rank, rank + 1)
        _check_samplers(loader, ranks[0], self.world_size)
        self.dataset = getattr(loader, "dataset", None)
        sizes = (getattr(each, "batch_size", None) for each in (loader, getattr(loader, "batch_sampler", None)))
        self.layout = BatchLayout(next(filter(None, sizes), 1), self.world_size, self.accumulation)
        self._ranks, self._size = (range(1), 1) if sharded else (ranks, self.world_size)
        self._repeats = self.world_size if sharded else 1
        self._full_rows = 0
        self._length = _length(loader)
        if self.whole_turns and self._length is not None:
            self._length -= self._length % self._size
        self.has_length = self._length is not None
        self.collate_fn = loader.collation.collate_fn if isinstance(loader, StreamLoader) else None
        stateless = isinstance(self.dataset, IterableDataset) and not hasattr(self.dataset, "state_dict")
        self._rereads = stateless or isinstance(loader, StreamLoader)  # also where the loader has a state
        self._first = own_state(loader)
        self._position: dict[str, Any] = self._state(0, 0, ended=True)
        self._begun = self._announces = False  # this process has iterated it, and trains
        self._source: Any = None  # the iterator

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a complete epoch; of a loader without a length, those of the run."""
        if self._length is not None:
            return -(-self._length // (self._size * self.layout.accumulation))
        if self.max_steps is None:
            raise UsageError(f"max_steps: {type(self.given).__name__} has no length; set max_steps")
        return self.max_steps

    def state_dict(self) -> dict[str, Any]:
        """The position that the consumer has reached, as plain values."""
        return self._position

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Moves to a position. Raises CheckpointMismatch where it is one of another loader."""
        state = dict(state)
        if "own" not in state:  # an older checkpoint, with torch's generators alone
            parts = parts_of(self.given)
            torchs = [str(place) for place, each in enumerate(parts) if isinstance(each, torch.Generator)]
            state["own"] = dict(zip(torchs, map(bytes.fromhex, state["generators"]), strict=False))
        moves = isinstance(self.given, StreamLoader) and state["loader"] is not None  # its position is in samples
        if moves and state["samples"]:
            state["samples"] = -(-state["loader"]["samples"] // self.given.batch_size)
        for name in ("order",) if isinstance(self.given, StreamLoader) else ("order", "batches", "batch_size"):
            if name == "batch_size" and (name not in state or not state["samples"]):
                continue  # an older checkpoint; or the epoch begins
            if state.get(name) != self._position[name]:
                raise CheckpointMismatch(
                    f"data position: {name} was {state.get(name)!r} when it was saved and is {self._position[name]!r} "
                    "now; resume with the same data loader"
                )
        self._position = state
        if self._begun and not state["samples"] and not state["ended"]:  # a callback has ended the epoch early
            self._position = self._state(state["epoch"], 0, ended=False)

    def announce_epoch(self) -> None:
        """Lets the next iteration tell the dataset its epoch, as samplers are told it in any case."""
        self._announces = not hasattr(self.given, "set_epoch")  # which passes it on

    def begin_epoch(self) -> None:
        """Moves to the beginning of the epoch, whose random numbers it draws again."""
        if self._position["samples"]:
            self._position = {**self._position, "samples": 0, "loader": None}

    def state_after(self, steps: int, epoch: float) -> dict[str, Any]:
        """The position after `steps` steps of another tool with this loader; `epoch` is ignored."""
        group = self._size * self.layout.accumulation
        passes, rest = divmod(steps, self.steps_per_epoch) if self._length is not None else (0, steps)
        return self._state(passes, rest * group, ended=not rest)

    def ahead(self) -> Iterator[StepBatch]:
        """The steps from the position to the end of its epoch, without moving the position."""
        epoch, taken = self._position["epoch"], self._position["samples"]
        begun = self._position["own"]
        batches = self._batches(epoch, taken)
        if self.whole_turns:
            batches = _whole_turns(batches, self._size)
        following = next(batches, None)
        if following is None:
            raise DataError(
                f"{type(self.given).__name__} has no batch after the first {taken} in epoch {epoch}; return a loader "
                "that can be iterated in every epoch"
            )
        while following is not None:
            group = [following, *islice(batches, self._size * self.layout.accumulation - 1)]
            taken += len(group)
            state = self._loader_state()
            own = begun if state is None or self._rereads else None
            after = self._state(epoch, taken, ended=False, loader=state, own=own)
            following = next(batches, None)
            if following is None:
                after = self._state(epoch + 1, 0, ended=True, loader=state)
            passed = 1.0 if following is None else taken / self._length if self._length else 0.0
            samples = self._repeats * sum(rows_of(inputs) for inputs in group)
            yield StepBatch(self._mine(group), samples, epoch + min(passed, 1.0), after)

    def _batches(self, epoch: int, taken: int) -> Iterator[Any]:
        """The loader's batches after the first `taken` of an epoch."""
        stream = _RandomStream((self.seed, epoch, 0))
        parts, fresh = parts_of(self.given), not self._begun
        saved, self._begun = self._position["loader"] if fresh else None, True
        with self._as_it_began() if fresh or taken else nullcontext(), stream.drawing():
            sources = (each for each in parts if each is not self.dataset and not isinstance(each, Dataset))
            for owner in (*sources, self.dataset if self._announces else None):
                if hasattr(owner, "set_epoch"):
                    owner.set_epoch(epoch)
                if getattr(owner, "persistent_workers", False) and not hasattr(owner, "state_dict"):
                    owner._iterator = None  # workers of an earlier epoch go on in its random numbers
            if saved is not None:
                self.given.load_state_dict(saved)
            self._source = source = iter(self.given)
            if taken and saved is None:
                logger.info("%s has no state_dict: skipping its first %d batches", type(self.given).__name__, taken)
                for _ in islice(source, taken):
                    pass
            elif taken and getattr(self.given, "num_workers", 0):
                logger.warning(
                    "%s: its state has no random numbers of its workers: where the data draw any, they are others from "
                    "here on than without the stop; set num_workers to 0",
                    type(self.given).__name__,
                )
        for place in count(taken):
            if not self._rereads and hasattr(self.given, "load_state_dict"):
                stream = _RandomStream((self.seed, epoch, place))
            with stream.drawing():
                try:
                    inputs = next(source)
                except StopIteration:
                    return
            inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
            if self._size > 1 and any(hasattr(each, "of_part") for each in tree_leaves(inputs)):
                raise UsageError(
                    "a loader of your own has batches of the Trainer's, which are this rank's part already, and ranks "
                    "would take turns with them: make it of the dataset, or change the batches in a data_collator"
                )
            yield inputs

    def _mine(self, group: list[Any]) -> list[MicroBatch]:
        """The micro-batches of a step of each own rank; the last batch, with weight 0, replaces missing ones."""
        steps = range(self.layout.accumulation)
        places = [step * self._size + rank for rank in self._ranks for step in steps]
        last = len(group) - 1
        return [self._micro_batch(group[min(place, last)], empty=place > last) for place in places]

    def _micro_batch(self, inputs: Any, *, empty: bool) -> MicroBatch:
        rows = rows_of(inputs)
        self._full_rows = max(self._full_rows, rows)
        short = self.fixed_shape and isinstance(inputs, dict) and rows < self._full_rows
        filled = short and self.labels.can_ignore_rows(inputs, rows)
        if filled:
            inputs = _filled(inputs, rows, self._full_rows)
        rows = 0 if empty else rows
        if (filled or empty) and isinstance(inputs, dict):
            inputs = self.labels.without(inputs, rows)
        return MicroBatch(inputs, rows, self.labels.count(inputs), filled or empty)

    def _state(self, epoch: int, taken: int, *, ended: bool, loader: Any = None, own: Any = None) -> dict[str, Any]:
        return {
            "epoch": epoch,
            "samples": taken,
            "batches": self._length,
            "batch_size": getattr(self.given, "batch_size", None),
            "order": ORDER,
            "ended": ended,
            "loader": loader,
            "own": changed_state(self._first, self.given) if own is None else own,
        }

    def _loader_state(self) -> Any:
        inner = getattr(self.given, "base_dataloader", self.given)  # accelerate's lack a state where theirs has none
        owner = self.given if hasattr(inner, "state_dict") else self._source
        return owner.state_dict() if hasattr(owner, "state_dict") and hasattr(inner, "load_state_dict") else None

    @contextmanager
    def _as_it_began(self) -> Iterator[None]:
        """The user's generators and numbers are those of the position, which the block may move on. What it leaves
        alone is then what others have set, such as a callback."""
        saved, others = self._position["own"], changed_state(self._first, self.given)
        if not saved.keys() <= own_state(self.given).keys():  # maybe some are made when they are needed first
            next(iter(self.given), None)
        begun = {**self._first, **saved}
        set_own_state(begun, self.given)
        yield
        now = own_state(self.given)
        left = {name: each for name, each in others.items() if is_same(now.get(name), begun.get(name))}
        continues = self._position["loader"] is not None and not self._rereads  # torchdata's moves generators on
        set_own_state({**left, **(saved if continues else {})}, self.given)


class _RandomStream:
    """Random numbers of one epoch: each block continues where the previous one ended."""

    def __init__(self, key: tuple[int, ...]) -> None:
        with seeded_generators(key):
            self._states = random_states()

    @contextmanager
    def drawing(self) -> Iterator[None]:
        outside = random_states()
        set_random_states(self._states)
        try:
            yield
        finally:
            self._states = random_states()
            set_random_states(outside)


def _whole_turns(batches: Iterator[Any], size: int) -> Iterator[Any]:
    while len(turn := list(islice(batches, size))) == size:
        yield from turn


def is_sharded(loader: Any) -> bool:
    """Whether each rank's loader has its own batches, as with DistributedSampler, or after accelerate's `prepare`."""
    names = ("num_processes", "num_replicas")
    return any((getattr(each, name, None) or 1) > 1 for each in _samplers(loader) for name in names)


def _samplers(loader: Any) -> list[Any]:
    return [each for each in parts_of(loader) if isinstance(each, Sampler)]


def _check_samplers(loader: Any, rank: int, world_size: int) -> None:
    """Raises UsageError where ranks that need the same batches would get different ones."""
    if world_size > 1 and whole(getattr(loader, "dataset", None)) is not getattr(loader, "dataset", None):
        raise UsageError(
            "split_dataset_by_node: every rank iterates the whole loader and takes its batches in turn, so a split "
            "would drop data; remove it"
        )
    for sampler in _samplers(loader):
        parts, part = getattr(sampler, "num_replicas", None) or 1, getattr(sampler, "rank", rank)
        if parts > 1 and (parts, part) != (world_size, rank):
            raise UsageError(
                f"{type(sampler).__name__}: gives part {part} of {parts}, but this is data parallel rank {rank} of "
                f"{world_size}; ranks that share the model need the same batches: pass num_replicas={world_size} and "
                f"rank={rank}, or leave the sampler out"
            )


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # PyTorch's loader of an iterable dataset
        return None


def _filled(inputs: dict[str, Any], rows: int, wanted: int) -> dict[str, Any]:
    """The batch with its last row repeated."""
    repeated = torch.arange(wanted).clamp(max=rows - 1)
    by_row = {name for name, each in inputs.items() if isinstance(each, Tensor) and each.ndim and len(each) == rows}
    return {name: each[repeated] if name in by_row else each for name, each in inputs.items()}
