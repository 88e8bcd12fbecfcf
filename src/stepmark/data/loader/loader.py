"""The DataLoader, with a position that can be saved: every sample once per epoch, on any mesh, even after resuming.

`order.py` decides which samples are in a micro-batch, and `fetcher.py` makes it, in this process or in PyTorch's
workers. The loader combines the two and keeps the position that the consumer has reached.
"""

from __future__ import annotations

import copy
import dataclasses
import errno
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stepmark.data.loader.batch import MicroBatch, StepBatch
from stepmark.data.loader.collate import FIXED_SHAPES, CollateFn, Collation, PadTo, sample_length
from stepmark.data.loader.fetcher import CAUSE, Fetcher, MicroTask, seeded_generators
from stepmark.data.loader.labels import LabelRule
from stepmark.data.loader.mixture import MixtureOrder
from stepmark.data.loader.order import BatchLayout, Epoch, LengthGroups, SamplePosition, sample_order
from stepmark.errors import CheckpointMismatch, DataError, DataWorkerLost, StepmarkError, UsageError
from stepmark.filesystem.error_advice import first_line, with_advice
from stepmark.launch.signal_handlers import STOPPING

# Version of the algorithm that orders samples; a position saved under another one is rejected.
ORDERS = {True: "shuffled-1", False: "sequential-1"}
GROUPED = "grouped-1"


class DataLoader:
    """Batches of a map-style dataset, one `StepBatch` for each optimizer step, with a position that can be saved.

    A step takes `batch_size * world_size * accumulation` samples, the same ones on every mesh for which that product is
    the same. Iterating runs from the current position to the end of its epoch; iterating again starts the next epoch.
    The order depends on (seed, epoch) only, for any `num_workers`, and so do the random numbers that a collator draws
    from Python's, numpy's or PyTorch's CPU generator. The caller's generators are restored.

    Args:
        dataset: has `__len__` and `__getitem__`.
        batch_size: samples per micro-batch and rank.
        rank: this rank's data parallel coordinate, from 0 (default); or the range of those that this process hosts,
            `mesh.ranks.own`, whose micro-batches come one rank after the other.
        world_size: data parallel ranks, default 1; of `mesh.ranks.own` they are `mesh.ranks.total`.
        accumulation: micro-batches per step, default 1.
        seed: seeds the order and what collators draw; at least 0 (default).
        shuffle: a random order in every epoch (default), or the dataset's own.
        drop_last: leave out an incomplete last step of an epoch; default False.
        collate_fn: makes a batch of a list of samples, or `PadTo`. Default: samples are padded by `processing_class`,
            like transformers' DataCollatorWithPadding, else stacked; Stepmark's own datasets pad as they need.
        num_workers: worker processes, default 0: the calling process fetches.
        fixed_shape: fill incomplete micro-batches with rows that are not in the loss, as lazy devices need; see
            `MicroBatch`. A batch whose labels cannot mark rows as ignored stays as it is. Default False: only a rank
            without samples in a step gets such rows.
        pad_to: one length in tokens for all sequences, or several, of which the smallest that fits is used. With
            `fixed_shape` and several ranks, all ranks use the same length, so every sample is read once at the start.
            Default None: the loader pads nothing.
        pad_token_id: pads `input_ids`, default 0, where there is no tokenizer.
        processing_class: a tokenizer or feature extractor. Default: None.
        lengths: int64 [samples]: batches then hold samples of about the same length, see `LengthGroups`. Default None:
            the order does not depend on lengths.
        labels: how the model's loss uses labels, `MicroBatchLoss(model).labels`; default: an argument `labels`, of
            which -100 is ignored and none is shifted.
        prepare: applied to each sample before it is collated; default: none.

    Raises:
        UsageError: arguments that contradict each other, or a dataset without `__len__` or `__getitem__`.
        DataError: the dataset has not enough samples for one step.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        rank: int | range = 0,
        world_size: int = 1,
        accumulation: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        collate_fn: CollateFn | PadTo | None = None,
        num_workers: int = 0,
        fixed_shape: bool = False,
        pad_to: int | Sequence[int] | None = None,
        pad_token_id: int = 0,
        processing_class: Any = None,
        lengths: np.ndarray | None = None,
        labels: LabelRule | None = None,
        prepare: Callable[[Any], Any] | None = None,
    ) -> None:
        self.dataset = dataset
        self.ranks = rank if isinstance(rank, range) else range(rank, rank + 1)
        self.seed = seed
        self.shuffle = shuffle
        self.num_workers = num_workers
        self.fixed_shape = fixed_shape
        self.layout = BatchLayout(batch_size, world_size, accumulation)
        rule = labels or LabelRule()
        collator = collate_fn if pad_to is None else PadTo(pad_to, collate_fn)  # type: ignore[arg-type]
        given: dict[str, Any] = {"labels": rule, "pad_token_id": pad_token_id, "prepare": prepare}
        self._collation = Collation(dataset, collator, processing_class, free=not fixed_shape, **given)
        self.collate_fn = self._collation.collate_fn
        self._epoch = Epoch(_checked_size(dataset), self.layout.global_batch, drop_last)
        self._groups = None if lengths is None else LengthGroups.of(lengths, self.layout.global_batch)
        self._check()
        self._fetcher = Fetcher(dataset, self._collation, rule)
        self._mixture: MixtureOrder | None = getattr(dataset, "mixture_order", None)
        self._position = SamplePosition(0, 0)
        self._shapes: dict[str, torch.Size] | None = None
        self._lengths: np.ndarray | None = None

    def _check(self) -> None:
        if not self.ranks or not 0 <= self.ranks[0] <= self.ranks[-1] < self.layout.world_size:
            given = self.ranks[0] if len(self.ranks) == 1 else self.ranks
            raise UsageError(f"rank must be from 0 to {self.layout.world_size - 1}, not {given}")
        if self.seed < 0 or self.num_workers < 0:
            raise UsageError(f"seed and num_workers must not be negative: {self.seed}, {self.num_workers}")
        if self._groups is not None and (not self.shuffle or len(self._groups.lengths) != self._epoch.size):
            raise UsageError("lengths: should be one for each sample, of a dataset that is shuffled")
        if not self._epoch.size:
            raise DataError("the dataset is empty; give one with samples")
        if not self.steps_per_epoch:
            raise DataError(
                f"{self._epoch.size} samples are fewer than one step's {self.layout.global_batch}, and drop_last leaves"
                " them out; turn it off, or lower batch size or accumulation"
            )

    @property
    def shapes_vary(self) -> bool:
        """Whether full batches may differ in shape, other than by samples of different shapes."""
        return self._collation.varies

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a complete epoch."""
        return self._epoch.steps()

    def __len__(self) -> int:
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[StepBatch]:
        for step in self.ahead():
            self.load_state_dict(step.state)
            yield step

    def ahead(self) -> Iterator[StepBatch]:
        """The steps from the current position to the end of its epoch, without moving the position: for prefetchers,
        which pass each step's `state` to `load_state_dict` when the consumer takes the step."""
        start = self._position
        order = self._order(self._epoch.begin(start).epoch)
        tasks = [self._tasks(start, rank, order) for rank in self.ranks]
        each = self.layout.accumulation
        in_turn = (task for _ in self._epoch.walk(start) for own in tasks for task in islice(own, each))
        micro_batches = self._fetch(in_turn)
        for _, samples, after in self._epoch.walk(start):
            mine = list(islice(micro_batches, each * len(tasks)))
            yield StepBatch(mine, samples, after.epoch + after.samples / self._epoch.size, self._state(after))

    def state_dict(self) -> dict[str, Any]:
        """The position that the consumer has reached, as plain values; prefetched steps are not included."""
        return self._state(self._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Moves to a saved position; the next iteration starts there. Batch size, world size and accumulation may
        differ from those of the loader that saved it. Raises CheckpointMismatch for other data, another seed or another
        order."""
        expected = self.state_dict()
        for name in ("dataset_size", "seed", "order", "lengths"):
            saved, now = state.get(name), expected.get(name)
            if saved != now:
                raise CheckpointMismatch(
                    f"data position: {name} was {saved!r} when it was saved and is {now!r} now; resume with the"
                    " same data and data seed"
                )
        position = SamplePosition(int(state["epoch"]), int(state["samples"]))
        if position.epoch < 0 or not 0 <= position.samples <= self._epoch.size:
            raise CheckpointMismatch(
                f"data position: epoch {position.epoch}, samples {position.samples} is outside a dataset of"
                f" {self._epoch.size} samples; the saved state is corrupted"
            )
        self._position = position
        if self._groups is not None and self._groups.size != state["group_size"]:
            self._groups = dataclasses.replace(self._groups, size=int(state["group_size"]))

    def recorded(self) -> dict[str, Any]:
        """The position, and how steps divide the samples from there, as plain values; for `of_record`."""
        return {**self.state_dict(), **dataclasses.asdict(self.layout), "drop_last": self._epoch.drop_last}

    @classmethod
    def of_record(cls, record: Mapping[str, Any], dataset: Any, lengths: np.ndarray | None = None) -> DataLoader:
        """A loader of the same samples in the same order, at the position of what `recorded` has returned. `lengths`:
        int64 [samples], where samples were grouped by them. Raises CheckpointMismatch for other data."""
        given = {name: record[name] for name in ("batch_size", "world_size", "accumulation", "seed", "drop_last")}
        loader = cls(dataset, **given, shuffle="sequential" not in record["order"], lengths=lengths)
        loader.load_state_dict(record)
        return loader

    def samples_after(self, *counts: int) -> Iterator[tuple[int, list[list[tuple[int, ...]]]]]:
        """What the step after each of these numbers of steps is made of, without fetching it or moving the position:
        its epoch, from 0, and for each rank the indices of the samples of each micro-batch."""
        known: tuple[int, np.ndarray] | None = None
        for count in counts:
            begin = self._epoch.after(self._position, count)
            if known is None or known[0] != begin.epoch:
                known = begin.epoch, self._order(begin.epoch)
            ranks = []
            for rank in range(self.layout.world_size):
                tasks = islice(self._tasks(begin, rank, known[1]), self.layout.accumulation)
                ranks.append([task.indices[: task.rows] for task in tasks])
            yield begin.epoch, ranks

    def announce_epoch(self) -> None:
        """Tells a dataset with `set_epoch` the next step's epoch, from 0: it draws by seed and epoch alone."""
        epoch = self._epoch.begin(self._position).epoch
        if hasattr(self.dataset, "set_epoch"):
            with seeded_generators((self.seed, epoch, 0)):
                self.dataset.set_epoch(epoch)

    def begin_epoch(self) -> None:
        """Moves to the beginning of the epoch."""
        self._position = SamplePosition(self._position.epoch, 0)

    def again(self) -> DataLoader:
        """Another loader of the same samples, at its beginning."""
        other = copy.copy(self)
        other._position = SamplePosition(0, 0)
        return other

    def state_after(self, steps: int, epoch: float) -> dict[str, Any]:
        """The position of a run that another tool trained for `steps` steps, or `epoch` passes over the data: the same
        number of steps if they are as many passes here, else the same fraction of the data."""
        passes, rest = divmod(steps, self.steps_per_epoch)
        if abs(steps / self.steps_per_epoch - epoch) * self.steps_per_epoch < 1 or not epoch:
            return self._state(SamplePosition(passes, min(rest * self.layout.global_batch, self._epoch.size)))
        whole = int(epoch)
        return self._state(SamplePosition(whole, min(round((epoch - whole) * self._epoch.size), self._epoch.size)))

    def _state(self, position: SamplePosition) -> dict[str, Any]:
        order = ORDERS[self.shuffle] if self._mixture is None else self._mixture.name(self.shuffle)
        return {
            "epoch": position.epoch,
            "samples": position.samples,
            "dataset_size": self._epoch.size,
            "seed": self.seed,
            "order": order if self._groups is None else f"{GROUPED} {order}",
            **({} if self._groups is None else {"lengths": self._groups.digest, "group_size": self._groups.size}),
        }

    def _order(self, epoch: int) -> np.ndarray:
        """The samples of an epoch in their order, by index."""
        if self._mixture is not None:
            order = self._mixture.indices(self.seed, epoch, self.shuffle)
        else:
            order = sample_order(self._epoch.size, self.seed, epoch, self.shuffle)
        return order if self._groups is None else self._groups.order(order)

    def _tasks(self, start: SamplePosition, rank: int, order: np.ndarray) -> Iterator[MicroTask]:
        """A rank's tasks from a position to the end of its epoch, in order. `order`: that of the epoch."""
        begin = self._epoch.begin(start)
        lengths = self._measured_lengths()  # None: ranks may choose separately
        rows = self.layout.batch_size
        for position, samples, _ in self._epoch.walk(begin):
            step = order[position.samples : position.samples + samples]
            for micro_step in range(self.layout.accumulation):
                offset = self.layout.offset(rank, micro_step)
                mine = step[offset : offset + rows]
                filler = rows - len(mine) if self.fixed_shape or not len(mine) else 0
                first = self.layout.offset(0, micro_step)
                of_all_ranks = step[first : first + rows * self.layout.world_size]
                used = of_all_ranks if len(of_all_ranks) else step[-1:]
                yield MicroTask(
                    indices=tuple((mine if len(mine) else step[-1:]).tolist()),
                    rows=len(mine),
                    filler=filler,
                    key=(self.seed, position.epoch, position.samples + offset),
                    # None where no stated length fits, which raises an error when the batch is collated.
                    length=None if lengths is None else self._collation.fit(int(lengths[used].max())),
                )

    def _measured_lengths(self) -> np.ndarray | None:
        """The length of every sample, measured once; None if ranks need not agree on a length."""
        if len(self._collation.lengths) < 2 or not self.fixed_shape or self.layout.world_size == 1:
            return None
        if self._lengths is None:
            measured = (sample_length(self.dataset[index]) for index in range(self._epoch.size))
            self._lengths = np.fromiter(measured, dtype=np.int64, count=self._epoch.size)
            if not self._lengths.any():
                raise UsageError(
                    "pad_to: among several ranks one of several lengths can only be chosen for samples that have"
                    " input_ids; give one length"
                )
        return self._lengths

    def _fetch(self, tasks: Iterator[MicroTask]) -> Iterator[MicroBatch]:
        for micro_batch in self._in_workers(tasks) if self.num_workers else map(self._fetcher.fetch, tasks):
            self._check_shape(micro_batch)
            yield micro_batch

    def _in_workers(self, tasks: Iterator[MicroTask]) -> Iterator[MicroBatch]:
        """The same through PyTorch's worker processes, which fetch ahead and give results in order."""
        loader: Any = torch.utils.data.DataLoader(
            self._fetcher,
            batch_size=None,
            sampler=tasks,
            num_workers=self.num_workers,
            worker_init_fn=_ignore_signals,
            generator=torch.Generator(),  # else the workers' seeds are drawn from the caller's generator
        )
        try:
            results: Any = iter(loader)
        except OSError as error:
            full = "/dev/shm is full; enlarge it, or lower the number of workers"
            reason = full if error.errno == errno.ENOSPC else with_advice(error.strerror or str(error), error)
            raise DataWorkerLost(f"data workers cannot be started: {reason}") from error
        workers = list(results._workers)
        try:
            yield from _checked(results)
        finally:
            results._shutdown_workers()
            for worker in workers:  # those still running ignore SIGTERM
                if worker.is_alive():
                    worker.kill()

    def _check_shape(self, micro_batch: MicroBatch) -> None:
        """With a fixed shape and no stated lengths, micro-batches have the first's shapes, or fewer rows."""
        if not self.fixed_shape or self._collation.lengths or not isinstance(micro_batch.inputs, Mapping):
            return
        if 0 < micro_batch.rows < self.layout.batch_size and not micro_batch.filled:
            return
        shapes = {name: value.shape for name, value in micro_batch.inputs.items() if isinstance(value, Tensor)}
        self._shapes = self._shapes or shapes
        if shapes != self._shapes:
            name = next(name for name in {**shapes, **self._shapes} if shapes.get(name) != self._shapes.get(name))
            before, now = (tuple(found.get(name, ())) for found in (self._shapes, shapes))
            raise UsageError(f"{name} has shape {now} where it had {before} before, and {FIXED_SHAPES}")


def _checked(results: Iterator[Any]) -> Iterator[MicroBatch]:
    try:
        for result in results:
            if isinstance(result, StepmarkError):
                raise result from vars(result)[CAUSE]
            yield result
    except (RuntimeError, ConnectionError, EOFError) as error:  # the last two of a worker's socket
        raise DataWorkerLost(
            f"a data worker ended unexpectedly ({first_line(error)}), out of memory or of /dev/shm perhaps; lower "
            "the number of workers, or set it to 0 to see its own error"
        ) from error


def _ignore_signals(_: int) -> None:
    """In a worker: ignores the signals that a launcher sends to all processes of a job, because the rank needs the
    worker to finish its step. A worker ends when its rank ends it or exits."""
    signal.set_wakeup_fd(-1)  # shared with the rank, which would see the worker's signals as its own
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


def _checked_size(dataset: Any) -> int:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UsageError(
            f"a {type(dataset).__name__} cannot be indexed, so its position cannot be saved; give a dataset with"
            " __len__ and __getitem__, such as a list or a datasets.Dataset"
        )
    return len(dataset)
