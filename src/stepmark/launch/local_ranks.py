"""`--nproc N`: runs the same command as N ranks on this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from stepmark.errors import UsageError

if TYPE_CHECKING:
    from stepmark.launch.restarts import Restarts


def start_ranks(
    parsed: argparse.Namespace,
    signal_grace: float,
    *,
    resumable: bool = False,
    on_failure: Callable[[str], None] | None = None,
    on_interruption: Callable[[str], None] | None = None,
    restarts: Restarts | None = None,
) -> int:
    """Starts `parsed.nproc` ranks of the command line `parsed.arguments`, and returns the job's exit code; see
    `supervise`.

    Raises UsageError if `nproc` is below 1, or this process already is one of several ranks.
    """
    from stepmark.launch.supervisor import supervise
    from stepmark.launch.world import World

    if parsed.nproc < 1:
        raise UsageError(f"--nproc: must be at least 1, but is {parsed.nproc}")
    if World.from_environment().size > 1:
        raise UsageError("--nproc: this process is already one of several ranks; omit --nproc under torchrun or srun")
    command = rank_command(parsed.arguments)
    return supervise(
        command,
        parsed.nproc,
        signal_grace=signal_grace,
        resumable=resumable,
        show_traceback=parsed.traceback,
        unblocks_sigint=True,
        on_failure=on_failure,
        on_interruption=on_interruption,
        restarts=restarts,
    )


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
