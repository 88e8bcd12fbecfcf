"""`--nproc N`: the same command in N ranks on this machine."""

from __future__ import annotations

import argparse
import sys

from stepmark.errors import UsageError


def start_ranks(parsed: argparse.Namespace, signal_grace: float, *, resumable: bool = False) -> int:
    """Starts `parsed.nproc` ranks of the command line `parsed.arguments`, and returns their exit code.

    `resumable`: a run that a signal ended can be started again, wherever it was.
    """
    from stepmark.launch.supervisor import supervise
    from stepmark.launch.world import World

    if parsed.nproc < 1:
        raise UsageError(f"--nproc: should be at least 1, and is {parsed.nproc}")
    if World.from_environment().size > 1:
        raise UsageError("--nproc: this process is already one of several ranks; leave --nproc out under a launcher")
    command = rank_command(parsed.arguments)
    options = {"signal_grace": signal_grace, "resumable": resumable, "show_traceback": parsed.traceback}
    return supervise(command, parsed.nproc, **options)


def rank_command(arguments: list[str]) -> list[str]:
    """The same command line without --nproc."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip or argument.startswith("--nproc="):
            skip = False
        elif argument == "--nproc":
            skip = True
        else:
            kept.append(argument)
    return [sys.executable, "-m", "stepmark", *kept]
