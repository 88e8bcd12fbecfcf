"""The run whose ranks `--nproc` starts: what its files say of their end, and what restarted ranks resume from."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from stepmark.checkpoint.format.checkpoint_folders import checkpoints, step_of
from stepmark.checkpoint.format.manifest import save_of
from stepmark.config.recipe import Recipe
from stepmark.filesystem.printable import listed
from stepmark.launch.rank_count import RankCount
from stepmark.launch.step_board import GROUPED, MIXED, StepPlace
from stepmark.liveness.console import keep_console
from stepmark.trainer.interruption.run_end import record_supervised_end
from stepmark.trainer.run_folder.memory_snapshots import newest_snapshot
from stepmark.trainer.run_folder.run_log import RESTARTING, RunLog
from stepmark.trainer.run_folder.status import FAILED, INTERRUPTED, RESTART_DELAY, RUNNING, RunStatus


class SupervisedRun:
    """See `stepmark.launch.restarts.RestartedRun`. Create it before the ranks start; `command` is that of a rank."""

    def __init__(self, recipe: Recipe, command: Sequence[str]) -> None:
        self._args, self._command, self._began = recipe.training, list(command), time.time()
        self._folder, self._task = Path(self._args.output_dir), recipe.model.task
        self._earlier = set(self._to_go_on_from().values())

    def _to_go_on_from(self) -> dict[Path, tuple[str, str | None]]:
        """What identifies the save that each is of."""
        found = newest_snapshot(self._folder), *checkpoints(self._folder)
        return {path: (path.name, save_of(path)) for path in found if path is not None}

    def resuming_command(self, ranks: RankCount) -> list[str]:
        """A rank's command line that resumes from what this run has saved, or else starts as the run itself did: with
        its data parallel ranks, where processes can host them."""
        saved = [path for path, save in self._to_go_on_from().items() if save not in self._earlier]
        named = self._args.resume_from_checkpoint
        if not saved or self._args.save_only_model:
            begins = ranks.now < ranks.asked and not isinstance(named, str) and not (named and self._earlier)
            keeps = begins and ranks.replicas and not self._task
            return [*self._command, "--data_parallel_replicas", str(ranks.replicas)] if keeps else self._command
        # Where the run began from a named checkpoint there may be later ones, which it was to leave behind.
        newest = str(saved[0]) if isinstance(named, str) else "true"
        return [*self._command, "--resume_from_checkpoint", newest]

    @staticmethod
    def describe(place: StepPlace) -> str:
        """The samples of a step, by their indices in the training data."""
        from stepmark.data.loader.order import sample_order

        last = place.first + place.samples
        if place.shuffled == MIXED:
            return f"samples {place.first + 1} to {last} of the mixture's epoch {place.epoch}"
        if place.shuffled == GROUPED:
            return f"samples {place.first + 1} to {last} of epoch {place.epoch}, which is grouped by length"
        order = sample_order(place.size, place.seed, place.epoch, bool(place.shuffled))
        shown = listed([str(index) for index in order[place.first : last].tolist()])
        return f"samples {shown} of the training data (epoch {place.epoch})"

    def waiting(self, failure: str, step: int, what: str, seconds: float) -> None:
        log = self._log()
        log.describe(**{**RunStatus.read(self._folder).details, RESTART_DELAY: seconds})
        log.try_status(RUNNING, step, f"{failure}; {what}" if failure else what)
        keep_console(self._folder)
        at = f" at step {step}" if step else ""
        print(f"failed{at}: {failure}; {what}" if failure else what, file=sys.stderr, flush=True)

    def restarting(self, failure: str, step: int, attempt: int, delay: float, ranks: RankCount) -> None:
        self._log().event(RESTARTING, step, attempt=attempt, ranks=ranks.now, reason=failure, delay=delay)
        some = "" if ranks.least is None else f" with {ranks.now} of {ranks.asked} ranks"
        self.waiting(failure, step, f"attempt {attempt} starts{some} in {delay:g} s", delay)

    def interrupted(self, signal: str, *, waiting: bool) -> None:
        if not waiting:
            self._record(INTERRUPTED, f"{signal}: the ranks have ended; the last checkpoint stands")
            return
        step = next((step_of(path) or 0 for path in checkpoints(self._folder)), 0)
        reason = f"{signal}: before another attempt; {'the last checkpoint stands' if step else 'nothing is saved'}"
        self._log().try_status(INTERRUPTED, step, reason)
        print(f"interrupted by {reason}", file=sys.stderr, flush=True)

    def failed(self, message: str) -> None:
        self._record(FAILED, message)

    def _record(self, state: str, reason: str) -> None:
        file = self._args.prometheus_file
        first = state == FAILED
        record_supervised_end(self._folder, state, reason, began=self._began, prometheus_file=file, first=first)

    def _log(self) -> RunLog:
        return RunLog(self._folder, writes=self._folder.is_dir())
