"""Samples of processor, memory, disk and network from /proc while a rank trains.

Every rank appends to its own file, `output_dir/system/rank-<n>.jsonl`. A sample takes less than a millisecond; the
interval is 1 % of the time since the start, between 1 and 15 seconds.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from stepmark.filesystem.files import make_own_folder
from stepmark.filesystem.json_files import append_line
from stepmark.runtime.base import Runtime
from stepmark.runtime.hardware import machine_memory
from stepmark.trainer.run_folder.run_log import SYSTEM
from stepmark.trainer.telemetry.throughput import memory_fields

logger = logging.getLogger("stepmark")
SHORTEST, LONGEST, SHARE = 1.0, 15.0, 0.01


class SystemSampler:
    """Samples of one rank, and of the memory of `runtime`; none at all unless it `writes`. Rates are means over the
    time since the sample before."""

    def __init__(self, folder: Path, rank: int, runtime: Runtime, *, writes: bool = True) -> None:
        self._path = folder / SYSTEM / f"rank-{rank}.jsonl"
        self._runtime = runtime
        self._writes = writes
        self._began = self._last = time.monotonic()
        self._counters = read_counters()

    def poll(self, step: int) -> None:
        """Takes a sample after a step if one is due. Sampling ends, with a warning, where one cannot be written."""
        now = time.monotonic()
        if not self._writes or now - self._last < min(max((now - self._began) * SHARE, SHORTEST), LONGEST):
            return
        try:
            self._sample(step, now)
        except OSError as error:
            logger.warning("cannot write %s: %s", self._path, error.strerror)
            self._writes = False

    def _sample(self, step: int, now: float) -> None:
        counters, before, seconds = read_counters(), self._counters, now - self._last
        self._counters, self._last = counters, now
        rates = {name: (value - before[name]) / seconds for name, value in counters.items() if name in before}
        make_own_folder(self._path.parent)
        append_line(self._path, {"step": step, "time": time.time(), **rates, **self._memory()})

    def _memory(self) -> dict[str, Any]:
        machine, own = machine_memory(), memory_fields(self._runtime)
        found = {} if machine is None else {"host_memory_used": 1 - machine[1] / machine[0]}
        fields = {"host_memory": "memory", "device_memory": "device_memory"}
        return found | {name: own[field] for field, name in fields.items() if field in own}


def read_counters() -> dict[str, float]:
    """Monotonic counters; those that the system lacks are left out. Of this process: `processor` (seconds), `disk_read`
    and `disk_written` (bytes). Of the host or container: `network_received` and `network_sent` (bytes), without the
    loopback interface."""
    times = os.times()
    found = {"processor": times.user + times.system}
    with suppress(OSError, LookupError, ValueError):
        lines = dict(line.split(":", 1) for line in Path("/proc/self/io").read_text().splitlines())
        found |= {"disk_read": float(lines["read_bytes"]), "disk_written": float(lines["write_bytes"])}
    with suppress(OSError, LookupError, ValueError):
        devices = [line.split(":", 1) for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
        rows = [list(map(float, numbers.split())) for name, numbers in devices if name.strip() != "lo"]
        found |= {"network_received": sum(row[0] for row in rows), "network_sent": sum(row[8] for row in rows)}
    return found
