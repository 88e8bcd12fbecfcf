"""Parses the command line, calls the command, and turns errors into one line and an exit code.

Exit codes: 0 done; 1 it failed, or what it checked is bad; 2 the call is wrong; 75 interrupted and resumable.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import stepmark
from stepmark.cli import consolidate as consolidate_command
from stepmark.cli import evaluate as evaluate_command
from stepmark.cli import inspect as inspect_command
from stepmark.cli import report as report_command
from stepmark.cli import train as train_command
from stepmark.cli import verify as verify_command
from stepmark.errors import LaunchError, UsageError
from stepmark.launch.failure_report import REPORTS, FailureReport
from stepmark.launch.world import World

COMMANDS: dict[str, Any] = {
    "train": train_command,
    "evaluate": evaluate_command,
    "consolidate": consolidate_command,
    "inspect": inspect_command,
    "report": report_command,
    "verify": verify_command,
}

OTHERS_FIRST = 1.5  # seconds


class _Parser(argparse.ArgumentParser):
    """Raises UsageError instead of printing usage and leaving."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="stepmark", description=stepmark.__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"stepmark {stepmark.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.HELP, allow_abbrev=False)
        command.add_argument("--traceback", action="store_true", help="show where in the code an error came from")
        module.add_arguments(command)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit code."""
    with_traceback = "--traceback" in arguments
    try:
        parsed, unknown = build_parser().parse_known_args(arguments)
        command = COMMANDS[parsed.command]
        if unknown:
            explain = getattr(command, "explain_unknown", _one_too_many)
            raise UsageError(explain(unknown[0]))
        parsed.arguments = list(arguments)
        return int(command.run(parsed))
    except KeyboardInterrupt as error:
        return _fail(error, with_traceback)
    except Exception as error:
        return _fail(error, with_traceback)


def _one_too_many(argument: str) -> str:
    return f"{argument}: is no argument of this command; see --help"


def _fail(error: BaseException, with_traceback: bool) -> int:
    world = _world()
    failure = FailureReport.of(error, world.rank)
    if REPORTS in os.environ:
        failure.leave(os.environ[REPORTS])
        return failure.exit_code
    if with_traceback:
        traceback.print_exception(error)
    if with_traceback or _should_tell(failure, world):
        print(f"error: {failure.message}", file=sys.stderr, flush=True)
    return failure.exit_code


def _world() -> World:
    """This rank's place; alone where the variables that tell it are what is wrong."""
    try:
        return World.from_environment()
    except LaunchError:
        return World()


def _should_tell(failure: FailureReport, world: World) -> bool:
    """Of several ranks under another launcher that have found each other, the first to fail tells. Before that a wrong
    call fails on all, and one rank of each node tells. A missing device may be one rank's alone: there the first of a
    node tells, and the others if no launcher has ended them by then, which is what torchrun does."""
    context = sys.modules.get("stepmark.runtime.context")
    distributed = sys.modules.get("torch.distributed")
    if context is not None and distributed is not None and distributed.is_initialized():
        return bool(context.first_to_fail())
    if failure.exit_code != UsageError.exit_code and world.local_rank > 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(OTHERS_FIRST)
        return True
    return world.local_rank == 0
