"""On Neuron, graphs are compiled by AWS's `neuron_parallel_compile`: it runs a command that only extracts them, then
compiles all of them in parallel into Neuron's cache."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from typing import NoReturn

from stepmark.errors import DeviceError, UsageError
from stepmark.launch.world import World
from stepmark.runtime.compile_cache import Setting, prepare_compile_cache
from stepmark.runtime.hardware import neuron_device_present, torch_xla_installed
from stepmark.runtime.xla_environment import extracting_graphs

TOOL = "neuron_parallel_compile"


def needs_parallel_compile(device: str) -> bool:
    """Whether graphs for `device` (of the recipe) are for Neuron's compiler, and its tool does not run this process."""
    lazy = device in ("auto", "xla") and torch_xla_installed()
    return lazy and neuron_device_present() and not extracting_graphs()


def check_kept(compile_cache: Setting) -> None:
    """Raises UsageError where graphs would not be kept."""
    if compile_cache is False:
        raise UsageError("compile_cache: is false, so no graph would be kept; leave it out, or name a folder")


def run_parallel_compile(arguments: Sequence[str], compile_cache: Setting) -> NoReturn:
    """Replaces this process by the tool, which runs the same command line.

    Raises:
        UsageError: This process is one of several ranks: the tool has to start all of them.
        DeviceError: The tool is not installed.
    """
    if World.from_environment().size > 1:
        raise UsageError(
            f"precompile: this process is one of several ranks, and {TOOL} has to start them: use --nproc, or run "
            f"`{TOOL} torchrun … -m stepmark precompile …`, or `{TOOL} srun … stepmark precompile …`"
        )
    tool = shutil.which(TOOL)
    if tool is None:
        raise DeviceError(f"precompile: {TOOL} is not on the PATH; install torch-neuronx, which brings it")
    check_kept(compile_cache)
    prepare_compile_cache(compile_cache)
    sys.stdout.flush()
    command = shlex.join([sys.executable, "-m", "stepmark", *arguments])
    os.execv(tool, [TOOL, "sh", "-c", f"exec {command}"])  # one word: the tool would take --log_level for its own
