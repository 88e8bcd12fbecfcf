"""`stepmark train RECIPE.yaml [--FIELD VALUE …]`"""

from __future__ import annotations

import argparse
import contextlib
import os
from functools import partial
from pathlib import Path

from stepmark.cli.recipe_fields import add_run_arguments, recipe_of
from stepmark.config.recipe import Recipe, kept_text
from stepmark.errors import CheckpointBusy, UsageError
from stepmark.launch.rank_count import RankCount
from stepmark.launch.restarts import check_restarts
from stepmark.launch.signal_handlers import raise_keyboard_interrupts
from stepmark.launch.signal_listener import RunInterrupted
from stepmark.launch.supervisor import follow_supervisor, rank_command, start_ranks
from stepmark.launch.world import World
from stepmark.liveness.failure_report import REPORTS, FailureReport, keep_failure
from stepmark.liveness.gc_pause import quick_imports
from stepmark.runtime.hardware import count_devices
from stepmark.runtime.xla_environment import extracting_graphs

HELP = "train a model from a recipe"
ENDS_AT_SIGNALS = True  # with exit code 75, from its first instruction on
add_arguments = partial(add_run_arguments, restarts=True)


def run(parsed: argparse.Namespace) -> int:
    follow_supervisor()
    from stepmark.recipe.early_checks import check_early
    from stepmark.recipe.used_recipe import check_not_moved

    recipe = recipe_of(parsed)
    if parsed.min_nproc is not None and (parsed.nproc is None or not recipe.training.max_restarts):
        raise UsageError("--min_nproc: is for ranks that are restarted; add --nproc and --max_restarts, or omit it")
    with contextlib.nullcontext() if parsed.nproc is None else kept_text(parsed.recipe):
        if not extracting_graphs():  # graphs need no data, and nothing is written
            if parsed.recipe is not None and parsed.output_dir is None:
                check_not_moved(Path(parsed.recipe), Path(recipe.training.output_dir))
            check_early(recipe)
        if parsed.nproc is not None:
            from stepmark.cli.supervised_run import SupervisedRun

            training = recipe.training
            return start_ranks(
                parsed,
                RankCount.of(parsed.nproc, parsed.min_nproc, training, count_devices),
                signal_grace=training.signal_grace,
                resumable=bool(training.save_on_signal),
                run=SupervisedRun(recipe, rank_command(parsed.arguments)),
                max_restarts=training.max_restarts,
            )
    check_restarts(recipe.training.max_restarts)
    return _train(recipe)


def _train(recipe: Recipe) -> int:
    from stepmark.trainer.interruption.run_end import ending_outside_training

    if extracting_graphs():  # the device returns placeholders, so there is nothing to train
        from stepmark.preflight.precompile.precompile import precompile

        precompile(recipe)
        return 0
    if not recipe.training.save_on_signal:
        raise_keyboard_interrupts()
    folder = Path(recipe.training.output_dir)
    with ending_outside_training(folder) if recipe.training.save_on_signal else contextlib.nullcontext():
        with quick_imports():
            from stepmark.recipe.train import train

        try:
            train(recipe)
        except RunInterrupted:
            raise
        except (Exception, SystemExit) as error:
            _keep(error, folder, recipe.training.prometheus_file)
            raise
    return 0


def _keep(error: BaseException, folder: Path, prometheus_file: str | None) -> None:
    """Records why this rank failed, also before training, unless a supervisor judges for all. Not of a wrong call."""
    from stepmark.trainer.interruption.run_end import record_supervised_end

    rank = World.from_environment().rank
    keep_failure(folder, error, rank)
    failure = FailureReport.of(error, rank)
    not_its_own = failure.secondary or isinstance(error, CheckpointBusy) or failure.exit_code == UsageError.exit_code
    if REPORTS not in os.environ and not not_its_own:
        record_supervised_end(folder, "failed", failure.message, prometheus_file=prometheus_file, first=True)
