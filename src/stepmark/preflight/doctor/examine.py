"""Looks at everything, and shows it as one page or as plain values."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stepmark.config.quiet_libraries import leave_out_torch_xla, quiet_libraries
from stepmark.config.recipe import Recipe
from stepmark.errors import LaunchError, StepmarkError
from stepmark.launch.world import World
from stepmark.preflight.doctor.findings import Finding, Status
from stepmark.preflight.doctor.known_versions import judge_versions
from stepmark.preflight.doctor.machine import (
    look_at_compile_cache,
    look_at_devices,
    look_at_launcher,
    look_at_machine,
    look_at_variables,
)
from stepmark.preflight.doctor.shared_folder import look_at_folder, look_at_place
from stepmark.runtime.compile_cache import NEURON_FLAGS, without_cache_folder
from stepmark.runtime.mesh import spread_of_experts
from stepmark.runtime.versions import PACKAGES, refused_peft, software_versions

MARKS = {Status.OK: " ", Status.WARNING: "?", Status.FAILURE: "!"}
RECIPE, GRAPHS = "recipe", "graphs"
PROBLEM = "warning: "  # begins a line of `stepmark precompile`


def examine(recipe: Recipe | None, path: str | None = None, overrides: Sequence[str] = ()) -> list[Finding]:
    """All findings, for a run of the recipe in the file `path`, overridden by flags; without one, for a run in the
    current folder with default fields."""
    wish = "auto" if recipe is None else recipe.training.device_name
    folder = Path.cwd() if recipe is None else Path(recipe.training.output_dir)
    workers = 0 if recipe is None else recipe.training.dataloader_num_workers
    devices = list(look_at_devices(wish))
    device = next((each.values["device"] for each in devices if "device" in each.values), wish)
    fields = [] if recipe is None or path is None else list(look_at_recipe(path, recipe, device))
    makes_graphs = _makes_graphs(device) and not will_fail(fields)
    return [
        *_versions(),
        *devices,
        *look_at_variables(device),
        *look_at_launcher(1 if recipe is None else fewest_ranks(recipe)),
        *look_at_compile_cache(device, None if recipe is None else recipe.training.compile_cache),
        *look_at_machine(workers),
        *look_at_folder(folder),
        *(() if recipe is None or recipe.training.mirror_to is None else look_at_place(recipe.training.mirror_to)),
        *fields,
        *(look_at_graphs(path, recipe, overrides) if recipe is not None and path is not None and makes_graphs else ()),
    ]


def _makes_graphs(device: str) -> bool:
    """Whether runs on the device make graphs, and this process may start ranks that make them."""
    try:
        return device == "xla" and World.from_environment().size == 1
    except LaunchError:  # the launcher's finding says it
        return False


def _versions() -> Iterator[Finding]:
    versions = software_versions()
    for name in ("python", *PACKAGES):
        text = versions.get(name, "not installed")
        yield Finding("versions", name, text, values={"version": versions.get(name)})
    yield from judge_versions(versions)
    if (refused := refused_peft()) is not None:
        yield Finding("versions", "transformers with peft", refused, Status.WARNING)


def look_at_recipe(path: str, recipe: Recipe, device: str) -> Iterator[Finding]:
    """Checks the recipe in the file `path` as a run on `device` does, before it reads data; the first fault counts."""
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


def look_at_graphs(path: str, recipe: Recipe, overrides: Sequence[str] = ()) -> Iterator[Finding]:
    """Makes the graphs of the recipe at `path` as `stepmark precompile` does, in processes of their own, and compiles
    none of them on Neuron. There are as many ranks as the recipe's mesh has at least."""
    ranks = fewest_ranks(recipe)
    name = f"{ranks} rank{'s' if ranks > 1 else ''}"
    print(f"doctor: making the graphs of {path} for {name}, which takes as long as a first step", file=sys.stderr)
    # Under the variable nothing is compiled for Neuron, and nothing saved.
    flags = without_cache_folder(os.environ.get(NEURON_FLAGS, ""))
    environment = {**os.environ, NEURON_FLAGS: flags, "NEURON_EXTRACT_GRAPHS_ONLY": "1"}
    with tempfile.TemporaryDirectory(prefix="stepmark-doctor-") as folder:
        command = ["precompile", path, *overrides, "--nproc", str(ranks), "--compile_cache", folder]
        done = subprocess.run(
            [sys.executable, "-P", "-m", "stepmark", *command], env=environment, capture_output=True, text=True
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
    spread = spread_of_experts(training.expert_parallel_size, training.tensor_parallel_size)
    replicas = max(2 if training.zero_1 else 1, spread)
    return training.tensor_parallel_size * training.pipeline_parallel_size * replicas


def will_fail(findings: Sequence[Finding]) -> bool:
    return any(finding.status == Status.FAILURE for finding in findings)


def to_text(findings: Sequence[Finding]) -> str:
    """One line a finding, under its topic: `!` will fail, `?` is a risk."""
    lines, width = [], max(len(finding.name) for finding in findings)
    for topic in dict.fromkeys(finding.topic for finding in findings):
        lines += [topic]
        lines += [
            f"{MARKS[each.status]}   {each.name:{width}}  {each.text}" for each in findings if each.topic == topic
        ]
    count = {status: sum(finding.status == status for finding in findings) for status in Status}
    failures, warnings = count[Status.FAILURE], count[Status.WARNING]
    summary = f"{failures} that will fail (!), {warnings} that may do harm (?)"
    return "\n".join([*lines, "", "nothing that will fail or do harm" if not failures + warnings else summary])


def to_json(findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "will_fail": will_fail(findings),
        "findings": [
            {"topic": each.topic, "name": each.name, "status": str(each.status), "text": each.text, **each.values}
            for each in findings
        ],
    }
