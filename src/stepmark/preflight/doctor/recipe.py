"""Whether a run of the recipe would be refused, and what in its graphs a compiler for accelerators rejects."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from stepmark.config.quiet_libraries import leave_out_torch_xla, quiet_libraries
from stepmark.config.recipe import Recipe
from stepmark.errors import StepmarkError
from stepmark.preflight.doctor.findings import Finding, Status
from stepmark.runtime.compile_cache import NEURON_FLAGS, without_cache_folder

RECIPE = "recipe"


def look_at_recipe(path: str, recipe: Recipe, device: str) -> Iterator[Finding]:
    """Checks the recipe in the file `path` as a run on `device` does, before it reads data; the first fault counts."""
    before = os.environ.get("USE_TORCH_XLA")
    quiet_libraries()
    if device != "xla":
        leave_out_torch_xla()
    try:
        from stepmark.recipe.train import check_recipe

        check_recipe(recipe)
    except StepmarkError as error:
        yield Finding(RECIPE, path, str(error), Status.FAILURE)
    else:
        yield Finding(RECIPE, path, "its fields, the files that they name and the model are in order")
    finally:
        if before is None:
            os.environ.pop("USE_TORCH_XLA", None)


GRAPHS = "graphs"
PROBLEM = "warning: "


def look_at_graphs(path: str, recipe: Recipe) -> Iterator[Finding]:
    """Makes the graphs of the recipe at `path` as `stepmark precompile` does, in processes of their own, and compiles
    none of them on Neuron. There are as many ranks as the recipe's mesh has at least."""
    ranks = fewest_ranks(recipe)
    name = f"{ranks} rank{'s' if ranks > 1 else ''}"
    print(f"doctor: making the graphs of {path} for {name}, which takes as long as a first step", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="stepmark-doctor-") as folder:
        command = ["precompile", path, "--nproc", str(ranks), "--compile_cache", folder]
        done = subprocess.run(
            [sys.executable, "-m", "stepmark", *command], env=_environment(), capture_output=True, text=True
        )
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        text = errors[-1].removeprefix("error: ") if errors else f"could not be made (exit code {done.returncode})"
        yield Finding(GRAPHS, name, text, Status.FAILURE)
        return
    lines = done.stdout.splitlines()
    problems = [line.removeprefix(PROBLEM) for line in lines if line.startswith(PROBLEM)]
    yield from (Finding(GRAPHS, name, problem, Status.WARNING) for problem in problems)
    if not problems:
        yield Finding(GRAPHS, name, "nothing in them that a compiler for accelerators rejects")


def fewest_ranks(recipe: Recipe) -> int:
    """The smallest number of ranks that the recipe's mesh allows."""
    training = recipe.training
    replicas = 2 if training.zero_1 else 1
    return training.tensor_parallel_size * training.pipeline_parallel_size * replicas


def _environment() -> dict[str, str]:
    """Under the variable nothing is compiled for Neuron, and nothing saved."""
    flags = without_cache_folder(os.environ.get(NEURON_FLAGS, ""))
    return {**os.environ, NEURON_FLAGS: flags, "NEURON_EXTRACT_GRAPHS_ONLY": "1"}
