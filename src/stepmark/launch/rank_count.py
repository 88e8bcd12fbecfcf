"""How many ranks `--nproc` starts: N, or with `auto` one for each device; with `--min_nproc` fewer if some are lost."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from stepmark.config.training_fields import TrainingFields
from stepmark.errors import UsageError
from stepmark.launch.join_clock import join_timeout
from stepmark.liveness.process_exit import say

Count = Callable[[str], tuple[str, int]]  # which devices a name means, and how many are there
MESH = "tensor_parallel_size, pipeline_parallel_size and expert_parallel_size"


def int_or_auto(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number or auto, but is {text!r}") from None


@dataclass
class RankCount:
    """An attempt has `now` ranks: `asked`, or as many as `fit` finds devices for, but `least`; None: always `asked`.
    `replicas`: the data parallel ranks, if fewer processes can host them. `timeout`: seconds for devices to return."""

    asked: int
    least: int | None = None
    fit: Callable[[], int] = int
    now: int = 0
    replicas: int | None = None
    timeout: float = 0.0
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def of(cls, nproc: int | str, least: int | None, args: TrainingFields, count: Count) -> RankCount:
        """What the options ask for, for a run with these fields; says how many ranks start, if devices decide. Raises
        UsageError that names the option."""
        tensor, pipeline, expert = args.tensor_parallel_size, args.pipeline_parallel_size, args.expert_parallel_size
        smallest, given = pipeline * math.lcm(tensor, expert), nproc if isinstance(nproc, int) else math.inf
        most = min(given, (args.data_parallel_replicas or math.inf) * tensor * pipeline)
        if least is not None and (not 0 < least <= most or least % smallest):
            limits = f"must be from {smallest} to {most}" + (f", a multiple of {smallest} ({MESH})" * (smallest > 1))
            raise UsageError(f"--min_nproc: {limits}, but is {least}; --nproc and data_parallel_replicas limit it")
        kind, devices = ("cpu", 0) if nproc == given and least is None else count(args.device_name)
        if nproc == given and kind == "cpu":  # which ranks share, however many they are
            return cls(int(given), now=int(given))

        def fit(devices: int) -> int:
            return int(min(most, devices)) // smallest * smallest

        found, needed = fit(devices), least or smallest
        if not found and least is None:
            raise UsageError(f"--nproc auto: {MESH} need {smallest} devices, of {devices} ({kind}); lower them")
        if needed <= found < given:
            idle = f", {devices - found} idle ({'data_parallel_replicas' if found == most else MESH})"
            say(f"--nproc {nproc}: ranks {found}, devices ({kind}) {devices}{idle if found < devices else ''}")
        asked, now = int(given) if nproc == given else max(found, needed), found if found >= needed else 0
        hosts = kind != "xla" and tensor % expert == 0 and args.hosts_ranks and not args.data_parallel_replicas
        replicas = asked // (tensor * pipeline) if hosts else None
        return cls(
            asked, least, lambda: min(asked, fit(count(kind)[1])), now, replicas, join_timeout(args.join_timeout)
        )

    def find(self, pause: Callable[[float], bool], waiting: Callable[[str, float], None]) -> str:
        """Sets `now`: waits until devices of the last attempt are back, their time is over, or `pause` returns False.
        Returns why they are too few, if they are."""
        needed, end = max(self.now, self.least or 0), self.clock() + self.timeout
        found = self.asked if self.least is None else self.fit()
        if found < needed:
            waiting(f"waits up to {self.timeout:g} s for the devices of {needed} ranks, {found} are left", self.timeout)
        while found < needed and self.clock() < end and pause(1.0):
            found = self.fit()
        self.now = found
        return f"too few devices, for {found} of {self.least} ranks (--min_nproc)" * (found < (self.least or 0))
