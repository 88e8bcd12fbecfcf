"""Monitors training: time, throughput, memory, saves, recompilations and anomalies.

It reads the clock and numbers that reach the host anyway. It never waits for the device, adds nothing to a graph and
does not communicate with other ranks, so a run trains the same with and without it.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from stepmark.checkpoint import SaveHandle
from stepmark.checkpoint.format.checkpoint_folders import step_of
from stepmark.config.fields import changed
from stepmark.config.training_fields import TrainingFields
from stepmark.data.loader.batch import StepBatch
from stepmark.liveness.progress import current
from stepmark.parallel.pipeline.staged_model import complete_size
from stepmark.runtime.versions import software_versions
from stepmark.runtime.xla_environment import extracting_graphs
from stepmark.trainer.components import TrainingComponents
from stepmark.trainer.run_folder.run_log import RunLog
from stepmark.trainer.run_folder.time_spent import TimeSpent
from stepmark.trainer.telemetry.anomalies import AnomalyDetector, SpikeDetector
from stepmark.trainer.telemetry.lazy_device import DeviceReadMonitor, RecompilationMonitor
from stepmark.trainer.telemetry.save_history import SaveHistory
from stepmark.trainer.telemetry.system_samples import SystemSampler
from stepmark.trainer.telemetry.throughput import RunTimers, Throughput, device_model, memory_fields

logger = logging.getLogger("stepmark")
MAX_COMPILATIONS = 100  # events of one process
LONGEST_COMMAND = 2000  # characters; the value of a token is left out
MAX_LINES = 5  # that read the device, named in one warning


class Telemetry:
    """The monitors of one run on one rank. Only the rank that writes the run's log reports findings."""

    def __init__(self, parts: TrainingComponents, run_log: RunLog) -> None:
        args, context = parts.args, parts.context
        folder, extracts = Path(args.output_dir), extracting_graphs()
        dtype = torch.bfloat16 if args.bf16 or args.fp16 or args.dtype == "bfloat16" else torch.float32
        self.timers = RunTimers()
        self.spent = TimeSpent({})
        watched = args.on_loss_spike is not None and not extracts
        self.spikes = SpikeDetector(args.loss_spike_window, args.loss_spike_threshold) if watched else None
        limit = 0 if extracts else args.stop_on_nan
        self.anomalies = AnomalyDetector(self._report_anomaly, stop_on_nan=limit, spikes=self.spikes)
        self._run_log = run_log
        self._runtime = context.runtime
        self.throughput = Throughput(parts.model, context.runtime, context.world.size, dtype)
        self._system = SystemSampler(folder, context.world.rank, context.runtime, writes=not extracts)
        self.saves = SaveHistory(run_log, folder, self.anomalies)
        self._recompilations: RecompilationMonitor | None = None
        self._device_reads: DeviceReadMonitor | None = None
        self._compilations = 0
        self._warned: set[tuple[str, str]] = set()
        self._part_began = 0.0
        self._before_step = {"compiling": 0.0, "waiting": 0.0}

    # The loop

    def started(self, parts: TrainingComponents, step: int) -> None:
        size = complete_size(parts.model)
        self._run_log.describe(**self.spent.begin())  # else what earlier attempts have spent is lost before a log
        self._run_log.event(
            "started",
            step,
            total_steps=parts.total_steps,
            ranks=parts.context.world.size,
            mesh=parts.mesh.shape,
            device=self._runtime.name,
            device_model=device_model(self._runtime),
            parameters=size.elements,
            trained_parameters=size.trained,
            software={**software_versions(), "torch": torch.__version__},
            metric_for_best_model=parts.args.best_metric_key,
            greater_is_better=parts.args.greater_is_better,
            command=re.sub(r"(--\w*token[= ])\S+", r"\1…", shlex.join(sys.orig_argv))[:LONGEST_COMMAND],
            commit=_commit() if self._run_log.writes else None,
            host=socket.gethostname(),
            seed=parts.args.seed,
            data_seed=parts.args.data_seed,
            arguments=json.loads(json.dumps(changed(parts.args.to_dict(), TrainingFields), default=str)),
        )

    def begin(self) -> None:
        """The loop begins; earlier compilations are not counted."""
        self.spent.begin()
        self.restart()
        if self._run_log.writes:
            self._recompilations = RecompilationMonitor(self._runtime, self._report_compilation)
            self._device_reads = DeviceReadMonitor(self._runtime, self._report_device_reads)

    def restart(self) -> None:
        """Steps follow; what was not logged yet counts in no log."""
        self.timers.restart()
        self.throughput.restart()

    @contextmanager
    def within_step(self, batch: StepBatch) -> Iterator[None]:
        """The block trains a step with this batch."""
        if (progress := current()) is not None:
            progress.step_begins()
        self._before_step = self._within_steps()
        if self._recompilations is not None:
            self._recompilations.begin(batch)
        with nullcontext() if self._device_reads is None else self._device_reads.within_step():
            yield

    def step_ended(self, step: int, batch: StepBatch) -> None:
        if (progress := current()) is not None:
            progress.step_ended(self._runtime.requested_graphs())
        for part, seconds in self._within_steps().items():
            self.timers.within_steps[part] += seconds - self._before_step[part]
        self.throughput.add(batch)
        if self._recompilations is not None:
            self._recompilations.ended("step", step)
        self.saves.poll()
        self._system.poll(step)

    def _within_steps(self) -> dict[str, float]:
        """Seconds so far that steps have compiled, and waited for other ranks."""
        progress = current()
        waiting = 0.0 if progress is None else progress.waited
        return {"compiling": self._runtime.compile_seconds(), "waiting": waiting}

    @contextmanager
    def within(self, part: str, step: int) -> Iterator[None]:
        """The block is an evaluation, or a save, after this step."""
        self._part_began = time.perf_counter()
        with self.timers.within(part):
            yield
        if self._recompilations is not None:
            self._recompilations.ended(part, step)

    def log_fields(self, seconds: float) -> dict[str, Any]:
        """The fields of a log that describe the machine, since the last call: so many seconds of training."""
        speed = self.throughput.fields(seconds)
        self.throughput.restart()
        return {**speed, **self.part_fields(), **memory_fields(self._runtime)}

    def part_fields(self) -> dict[str, float]:
        """Seconds of each part of training since the last call or log."""
        parts = self.timers.parts()
        self._run_log.describe(**self.spent.add(parts, self.timers.within_steps))
        self.timers.restart()
        return {f"seconds_{part}": seconds for part, seconds in parts.items()}

    def kept_seconds(self) -> float:
        """Of the steps up to now, as a checkpoint keeps them."""
        return self.spent.kept(self.timers.parts(), self.timers.within_steps)

    # Saves

    def save_begun(self, handle: SaveHandle) -> None:
        """Within the part "save": the checkpoint no longer keeps training from continuing."""
        self.saves.begun(handle, time.perf_counter() - self._part_began)

    def restored(self, checkpoint: Path, step: int, quarantined: Sequence[tuple[Path, str]]) -> None:
        """The run continues from this checkpoint; those in `quarantined` were corrupted, each with the reason."""
        for path, reason in quarantined:
            reason = reason.removeprefix(f"{path}/")
            self._run_log.event("set_aside", step_of(path) or 0, checkpoint=path.name, reason=reason)
        self.saves.restored(checkpoint, step)

    # Findings

    def _report_anomaly(self, kind: str, step: int, message: str) -> None:
        if self._run_log.writes:
            logger.warning("%s", message)
            self._run_log.event("trouble", step, kind=kind, message=message)

    def not_rolled_back(self, step: int) -> None:
        """There is no checkpoint to return to from a loss spike at this step."""
        assert self.spikes is not None
        self.spikes.found = None
        message = f"there is no checkpoint from before the loss spike of step {step}; training goes on"
        self._report_anomaly("not_rolled_back", step, message)

    def _report_device_reads(self, lines: list[str]) -> None:
        shown = ", ".join(lines[:MAX_LINES]) + (", …" if len(lines) > MAX_LINES else "")
        logger.warning(
            "every step reads values from the lazy device, which ends the graph and makes the host wait: %s; change "
            "these lines, or use a model that docs/tables.md lists as undisturbed",
            shown,
        )

    def _report_compilation(self, step: int, where: str, count: int, reason: str, cached: int | None) -> None:
        place = {"evaluation": "the evaluation after ", "save": "the save of "}.get(where, "")
        made = "a graph again" if count == 1 else f"{count} graphs again"
        read = f", {cached} of which the compile cache had" if cached else ""
        message = f"{place}step {step} compiled {made}{read}: {reason}"
        self._compilations += 1
        if self._compilations <= MAX_COMPILATIONS:
            told = {"where": where, "count": count, "cached": cached, "reason": reason}
            self._run_log.event("compilation", step, **told, message=message)
        if (where, reason) not in self._warned:
            self._warned.add((where, reason))
            logger.warning("%s", message)


def _commit() -> str | None:
    """The commit of the repository that the process runs in; None without one."""
    try:
        told = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout.strip() or None
