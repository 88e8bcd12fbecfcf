"""`stepmark precompile RECIPE.yaml [--nproc N] [--FIELD VALUE …]`"""

from __future__ import annotations

import argparse

from stepmark.cli.recipe_fields import add_run_arguments, recipe_of
from stepmark.launch.rank_count import RankCount
from stepmark.launch.supervisor import follow_supervisor, start_ranks
from stepmark.liveness.gc_pause import quick_imports
from stepmark.runtime.hardware import count_devices

HELP = "compile every graph of a recipe's run ahead of time, without data or weights; nothing of the run is saved"

add_arguments = add_run_arguments


def run(parsed: argparse.Namespace) -> int:
    recipe = recipe_of(parsed)  # before torch is imported
    from stepmark.preflight.precompile.neuron import needs_parallel_compile, run_parallel_compile

    if needs_parallel_compile(recipe.training.device_name):
        run_parallel_compile(parsed.arguments, recipe.training.compile_cache)
    if parsed.nproc is not None:
        return start_ranks(parsed, RankCount.of(parsed.nproc, None, recipe.training, count_devices), signal_grace=10.0)
    follow_supervisor()
    with quick_imports():
        from stepmark.preflight.precompile.precompile import precompile

    precompile(recipe)
    return 0
