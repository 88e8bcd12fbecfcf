"""The current step of each rank of `--nproc`, in memory that outlives the rank: one that is killed cannot report it."""

from __future__ import annotations

import functools
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from stepmark.liveness.failure_report import REPORTS
from stepmark.liveness.progress import current

_FORMAT = struct.Struct("7q")
_FILE = "steps"
# Other values of `shuffled`: samples of a mixture, or grouped by length.
MIXED, GROUPED = 2, 3


@dataclass(frozen=True)
class StepPlace:
    """A step, counted from 1, and its `samples` samples from number `first` on, in the order of `epoch`, which `size`,
    `seed` and `shuffled` determine, unless `shuffled` is MIXED or GROUPED. `step` is 0 before the first step, and
    `samples` while they are unknown."""

    step: int = 0
    epoch: int = 0
    first: int = 0
    samples: int = 0
    size: int = 0
    seed: int = 0
    shuffled: int = 0

    @classmethod
    def of(cls, step: int, samples: int, after: Mapping[str, Any]) -> StepPlace:
        """A step with this number of samples; `after` is the loader's state after it."""
        if not {"dataset_size", "samples", "epoch", "seed", "order"} <= after.keys():  # a loader of the user's own
            return cls(step)
        size, used, epoch = int(after["dataset_size"]), int(after["samples"]), int(after["epoch"])
        if not used:  # it was the last step of an epoch; samples that drop_last leaves out follow it
            used, epoch = size // samples * samples if size % samples else size, epoch - 1
        order = str(after["order"])
        known = {"mixture": MIXED, "grouped": GROUPED, "shuffled": True}
        shuffled = int(next((value for name, value in known.items() if order.startswith(name)), False))
        return cls(step, epoch, used - samples, samples, size, int(after["seed"]), shuffled)


NO_STEP = StepPlace()


def make_board(folder: str, ranks: int) -> None:
    """In the supervisor's folder for reports."""
    (Path(folder) / _FILE).write_bytes(bytes(_FORMAT.size * ranks))


def read_board(folder: str) -> list[StepPlace]:
    """The places of all ranks."""
    return [StepPlace(*each) for each in _FORMAT.iter_unpack((Path(folder) / _FILE).read_bytes())]


def show_step(place: StepPlace) -> None:
    """Shows this rank's current place to its heartbeats, and to the supervisor if there is one."""
    if (progress := current()) is not None:
        progress.at_step(place.step)
    if (board := _open_board()) is not None:
        _FORMAT.pack_into(board, _FORMAT.size * int(os.environ["RANK"]), *astuple(place))


@functools.cache
def _open_board() -> mmap.mmap | None:
    try:
        with open(Path(os.environ[REPORTS]) / _FILE, "r+b") as file:
            return mmap.mmap(file.fileno(), 0)
    except (KeyError, OSError, ValueError):
        return None
