"""The run's place in a bucket, as `mirror_to` says: rank 0 uploads, and the others wait where it has to be done."""

from __future__ import annotations

import atexit
import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from stepmark.checkpoint import Checkpointer, Retention
from stepmark.checkpoint.downloads import checkpoint_copy
from stepmark.checkpoint.format.checkpoint_folders import LEFT, best_step, checkpoints, quarantine, step_of
from stepmark.checkpoint.mirror import Mirror
from stepmark.checkpoint.places import Copied
from stepmark.config.training_fields import TrainingFields
from stepmark.errors import StepmarkError, UsageError
from stepmark.filesystem.local_paths import address_of
from stepmark.filesystem.objects import Bucket
from stepmark.launch.signal_listener import RunInterrupted
from stepmark.liveness.bounded_call import BoundedCall
from stepmark.liveness.failure_report import describe_error
from stepmark.liveness.host_group import HostGroup
from stepmark.liveness.process_exit import end_process, say
from stepmark.liveness.progress import SAVE, in_phase
from stepmark.runtime.context import Context
from stepmark.runtime.xla_environment import extracting_graphs
from stepmark.trainer.run_folder.output_folder import on_rank_0
from stepmark.trainer.run_folder.run_log import TRAINER_STATE, RunLog

TOLD = 5.0  # seconds after which the other ranks hear that rank 0 is still busy
AFTER_SIGNAL, AFTER_ERROR = 1.0, 30.0  # seconds for the last uploads of a run that was interrupted, or has failed


def _field_of(args: TrainingFields) -> str:
    """The field that names the run's place in a bucket."""
    return "output_dir" if args.place == args.mirror_to else "mirror_to"


def checkpoint_here(address: str, context: Context) -> str:
    """The path of the checkpoint at an address, of a run its newest. Collective. Raises CheckpointError."""
    return str(context.ask_leader(f"downloading {address}", lambda: str(checkpoint_copy(address, _best_of))))


def check_place(args: TrainingFields, host: HostGroup) -> None:
    """Tries there what a run needs, if it has one. Collective. Raises StepmarkError, on all ranks."""
    if args.mirror_to is None or extracting_graphs():
        return
    check = Bucket(args.mirror_to).check
    on_rank_0(host, check, lambda error: StepmarkError(f"{_field_of(args)}: {describe_error(error)}"))


class RunMirror:
    """On all ranks; without `mirror_to` there is no place, and nothing to do."""

    def __init__(
        self, args: TrainingFields, keep: list[Retention], checkpointer: Checkpointer, context: Context, run_log: RunLog
    ) -> None:
        self._context, self._host, self._log, self._folder = context, context.host, run_log, Path(args.output_dir)
        self.url = None if extracting_graphs() else args.mirror_to
        self._field = _field_of(args)
        self._mirror: Mirror | None = None
        if self.url is not None and self._host.rank == 0:
            self._mirror = Mirror(self._folder, Bucket(self.url), keep, self._told, checkpointer.delete_old, _best_of)
        if self.url is not None:
            checkpointer.keep_at(self.url, self._mirror)
        self._checkpointer = checkpointer

    def _told(self, copied: Copied, seconds: float) -> None:
        self._log.event("mirrored", copied.step or 0, bytes=copied.sent, seconds=seconds)
        self._log.describe_now(mirrored_checkpoint=f"checkpoint-{copied.step}")

    def _on_rank_0(self, work: Callable[[Mirror], Any]) -> Any:
        """As `on_rank_0`; the others hear from time to time that it is still busy. Collective."""
        if self.url is None:
            return None

        def explain(error: Exception) -> StepmarkError:
            told = StepmarkError(f"{self._field}: {describe_error(error)}")
            return error if isinstance(error, StepmarkError) else told

        with in_phase(SAVE):
            call = None if self._mirror is None else BoundedCall(partial(work, self._mirror), raises=True)
            while not self._host.broadcast(call is not None and call.ended(TOLD)):
                pass
            return on_rank_0(self._host, lambda: call and call.result(), explain, (OSError, StepmarkError))

    def open(self, resume: bool | str | None) -> bool | str | None:
        """Claims the folder and the place, and downloads what is newer than the folder's checkpoints where the run
        resumes. Returns `resume`, with a path in place of an address. Collective. Raises UsageError where an earlier
        run is there that does not go on, or StepmarkError."""
        if self.url is not None:
            self._checkpointer.claim()

        def claim(mirror: Mirror) -> None:
            mirror.divided_for = self._checkpointer.divided_for
            there = mirror.open()
            if not resume and (there or mirror.has_records()):
                what = f"checkpoints of an earlier run (checkpoint-{there[0]})" if there else "logs of an earlier run"
                raise UsageError(
                    f"{self._field}: {mirror.address} has {what}; to continue it, set resume_from_checkpoint: true, in "
                    "a script train(resume_from_checkpoint=True); or name another place"
                )

        self._on_rank_0(claim)
        if resume:
            self.fetch()  # also where a checkpoint is named: the logs up to it come along
        address = address_of(resume) if isinstance(resume, str) else None
        return resume if address is None else checkpoint_here(address, self._context)

    def fetch(self, *, damaged: bool = False) -> bool:
        """As `Mirror.fetch`; returns whether a checkpoint was downloaded. Collective."""
        tell = partial("{}: {}".format, self._field)
        return bool(self._on_rank_0(lambda mirror: mirror.fetch(lambda text: say(tell(text)), damaged=damaged)))

    def leave_later(self, step: int) -> list[Path]:
        """The run goes on from this step: later checkpoints are not used again, there and in the folder, where rank 0
        renames them. Returns their new paths, on rank 0. Collective."""
        self._on_rank_0(lambda mirror: mirror.leave(step))
        later = [path for path in checkpoints(self._folder) if (step_of(path) or 0) > step]
        return [quarantine(path, LEFT) for path in later] if self._host.rank == 0 else []

    def start(self) -> None:
        """Begins to upload, in the background."""
        if self._mirror is not None:
            self._mirror.start()

    def holding(self) -> AbstractContextManager[None]:
        """As `Mirror.holding`."""
        return nullcontext() if self._mirror is None else self._mirror.holding()

    def check(self) -> None:
        """Raises CheckpointBusy, on rank 0, where another run has taken the place over."""
        if self._mirror is not None:
            self._mirror.check()

    def finish(self, seconds: float = math.inf) -> str | None:
        """Waits until all is uploaded: None; or in words what is not, after an error or so long. Collective."""
        return self._on_rank_0(lambda mirror: mirror.finish(seconds))

    def complete(self) -> None:
        """The run is done. Collective. Raises StepmarkError where something of it cannot be uploaded."""
        if (behind := self.finish()) is not None:
            remedy = f"`stepmark copy {self._folder} {self.url}` uploads what is missing"
            raise StepmarkError(f"{self._field}: the run is done, and {behind}; {remedy}")
        if self._mirror is not None:
            self._mirror.close()
            if (earlier := _LATE.pop(self._folder, None)) is not None:
                atexit.unregister(earlier)
            _LATE[self._folder] = atexit.register(partial(_push_late, self._mirror))

    def __enter__(self) -> RunMirror:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._mirror is not None:
            stops = kind is not None and issubclass(kind, RunInterrupted)
            if kind is not None and self._mirror.started:
                self._mirror.finish(AFTER_SIGNAL if stops else AFTER_ERROR)
            self._mirror.close(*[AFTER_SIGNAL] * stops)


def _best_of(checkpoint: Path) -> set[int]:
    """The step of the best checkpoint, as far as a run that goes on from this one knows it, and where `best` points."""
    from stepmark.trainer.run_folder.log_history import read_state  # which imports transformers' callbacks

    found = {best_step(checkpoint.parent)}
    with contextlib.suppress(OSError, ValueError, TypeError):
        found.add(step_of(Path(str(read_state(checkpoint / TRAINER_STATE).best_model_checkpoint))))
    return {step for step in found if step is not None}


_LATE: dict[Path, Callable[[], None]] = {}  # by folder, what uploads what a program writes there after its run


def _push_late(mirror: Mirror) -> None:
    try:
        mirror.push_rest()
    except (OSError, StepmarkError) as error:
        end_process(StepmarkError(f"mirror_to: {describe_error(error)}; the files are in {mirror.folder}"), 0)
