"""What is watched beside training: time, speed, memory, saves, compilations and signs of trouble.

It reads the host's clock and numbers that are on the host anyway. It waits for no device, records nothing in a graph
and talks to no other rank, so a run trains the same with and without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stepmark.checkpoint.format.directory import step_of
from stepmark.data.batch import StepBatch
from stepmark.runtime.base import Runtime
from stepmark.runtime.peak_flops import device_model
from stepmark.trainer.telemetry.anomalies import Anomaly, AnomalyDetector
from stepmark.trainer.telemetry.device_reads import DeviceReadMonitor
from stepmark.trainer.telemetry.recompilation import Compilation, RecompilationMonitor
from stepmark.trainer.telemetry.run_log import RunLog
from stepmark.trainer.telemetry.save_history import SaveHistory
from stepmark.trainer.telemetry.throughput import Throughput, memory_fields
from stepmark.trainer.telemetry.timers import RunTimers

if TYPE_CHECKING:
    from stepmark.checkpoint import SaveHandle
    from stepmark.trainer.trainer import Trainer

logger = logging.getLogger("stepmark")
MOST_COMPILATIONS = 100  # events of one process
MOST_LINES = 5  # that read the device, named in one warning


class Monitor:
    """The watches of one run on one rank. Only the rank that writes the journal tells what it sees."""

    def __init__(self, journal: RunLog, folder: Path, runtime: Runtime, speed: Throughput) -> None:
        self.clock = RunTimers()
        self.trouble = AnomalyDetector(self._tell_sign)
        self._journal = journal
        self._runtime = runtime
        self._speed = speed
        self._saves = SaveHistory(journal, folder, self.trouble) if journal.writes else None
        self._graphs: RecompilationMonitor | None = None
        self._reads: DeviceReadMonitor | None = None
        self._compilations = 0
        self._warned: set[tuple[str, str]] = set()
        self._part_began = 0.0

    @classmethod
    def of(cls, trainer: Trainer) -> Monitor:
        runtime = trainer.context.runtime
        bf16 = trainer.args.bf16 or trainer.args.dtype == "bfloat16"
        dtype = torch.bfloat16 if bf16 else torch.float32
        speed = Throughput(trainer.model, runtime, trainer.context.world.size, dtype)
        return cls(trainer.journal, Path(trainer.args.output_dir), runtime, speed)

    # The loop

    def started(self, trainer: Trainer, total_steps: int, restored: Path | None) -> None:
        """This process is about to train, from the beginning or from a checkpoint."""
        step, args = trainer.state.global_step, trainer.args
        self._journal.event(
            "started",
            step,
            total_steps=total_steps,
            ranks=trainer.context.world.size,
            mesh=trainer.mesh.shape,
            device=self._runtime.name,
            device_model=device_model(self._runtime),
            metric_for_best_model=args.best_metric_key,
            greater_is_better=args.greater_is_better,
        )
        if restored is not None:
            attempt = trainer.journal.attempts() + 1
            self._journal.event("resumed", step, checkpoint=restored.name, attempt=attempt)

    def begin(self) -> None:
        """The loop begins; what was compiled so far is none of its business."""
        self.clock.restart()
        if self._journal.writes:
            self._graphs = RecompilationMonitor(self._runtime, self._tell_compilation)
            self._reads = DeviceReadMonitor(self._runtime, self._tell_reads)

    def step_begins(self, step: int, batch: StepBatch, rate: float) -> None:
        """Step number `step`, from 1, with this learning rate."""
        if self._journal.writes:
            self.trouble.begin(step, rate)
        if self._graphs is not None:
            self._graphs.begin(batch)

    def within_step(self) -> AbstractContextManager[None]:
        """Around the step itself."""
        return nullcontext() if self._reads is None else self._reads.within_step()

    def look(self, step: int, loss: float, tokens: float, norm: float) -> None:
        """The numbers of step number `step` have come to the host."""
        if self._journal.writes:
            self.trouble.look(step, loss, tokens, norm)

    def step_ended(self, step: int, batch: StepBatch) -> None:
        self._speed.add(batch)
        if self._graphs is not None:
            self._graphs.ended("step", step)
        if self._saves is not None:
            self._saves.poll()

    @contextmanager
    def within(self, part: str, step: int) -> Iterator[None]:
        """An evaluation, or a save, after this step."""
        self._part_began = time.perf_counter()
        with self.clock.within(part):
            yield
        if self._graphs is not None:
            self._graphs.ended(part, step)

    def log_fields(self) -> dict[str, Any]:
        """What a log tells beside the model's numbers; counts anew."""
        seconds = self.clock.training()
        parts = {f"seconds_{part}": spent for part, spent in self.clock.parts().items()}
        fields = {**self._speed.fields(seconds), **parts, **memory_fields(self._runtime)}
        self.clock.restart()
        self._speed.restart()
        return fields

    # Saves

    def save_begun(self, handle: SaveHandle) -> None:
        """In the part "save": training may go on from here, as far as the checkpoint is concerned."""
        if self._saves is not None:
            self._saves.begun(handle, time.perf_counter() - self._part_began)

    def restored(self, checkpoint: Path, step: int, aside: Sequence[tuple[Path, str]]) -> None:
        """The run goes on from this checkpoint; those in `aside` were damaged, for the reason beside them."""
        for path, reason in aside:
            reason = reason.removeprefix(f"{path}/")
            self._journal.event("set_aside", step_of(path) or 0, checkpoint=path.name, reason=reason)
        if self._saves is not None:
            self._saves.restored(checkpoint, step)

    def close(self) -> None:
        """Tells what is still to be told."""
        if self._saves is not None:
            self._saves.close()

    # What is seen

    def _tell_sign(self, sign: Anomaly) -> None:
        logger.warning("%s", sign.message)
        self._journal.event("trouble", sign.step, kind=sign.kind, message=sign.message)

    def _tell_reads(self, lines: list[str]) -> None:
        shown = ", ".join(lines[:MOST_LINES]) + (", …" if len(lines) > MOST_LINES else "")
        logger.warning(
            "every step reads values from the lazy device, which ends the graph and makes the host wait: %s; change "
            "these lines, or use a model that docs/lazy-devices.md lists as undisturbed",
            shown,
        )

    def _tell_compilation(self, seen: Compilation) -> None:
        graphs = "a graph" if seen.count == 1 else f"{seen.count} graphs"
        where = {"step": f"step {seen.step}", "evaluation": f"the evaluation after step {seen.step}"}
        message = f"{where.get(seen.where, f'the save of step {seen.step}')} compiled {graphs} anew: {seen.reason}"
        self._compilations += 1
        if self._compilations <= MOST_COMPILATIONS:
            self._journal.event(
                "compilation", seen.step, where=seen.where, count=seen.count, reason=seen.reason, message=message
            )
        if (seen.where, seen.reason) not in self._warned:
            self._warned.add((seen.where, seen.reason))
            logger.warning("%s", message)
