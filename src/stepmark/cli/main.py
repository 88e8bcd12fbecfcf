"""Parses the command line, runs the command, and turns errors into one line and an exit code.

Exit codes: 0 done; 1 failed, or a check found errors; 2 wrong usage; 75 interrupted and resumable.
"""

from __future__ import annotations

import argparse
import os
import select
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

OTHERS_FIRST = 1.5  # seconds that a rank waits for the first rank of its node


class _Parser(argparse.ArgumentParser):
    """Raises UsageError instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="stepmark", description=stepmark.__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"stepmark {stepmark.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.HELP, allow_abbrev=False)
        command.add_argument("--traceback", action="store_true", help="print the Python traceback of an error")
        module.add_arguments(command)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit code. Raises BrokenPipeError if the reader of stdout has gone."""
    with_traceback = "--traceback" in arguments
    try:
        parsed, unknown = build_parser().parse_known_args(arguments)
        command = COMMANDS[parsed.command]
        if unknown:
            explain = getattr(command, "explain_unknown", _unrecognized)
            raise UsageError(explain(unknown[0]))
        parsed.arguments = list(arguments)
        return int(command.run(parsed))
    except BrokenPipeError as error:
        if _output_is_closed() and REPORTS not in os.environ:
            raise
        return _fail(error, with_traceback)
    except (KeyboardInterrupt, Exception) as error:
        return _fail(error, with_traceback)


def _output_is_closed() -> bool:
    """Whether stdout is a pipe whose reader has gone."""
    try:
        pipe = select.poll()
        pipe.register(sys.stdout.fileno(), select.POLLOUT)
        return any(events & select.POLLERR for _, events in pipe.poll(0))
    except (OSError, ValueError):  # no descriptor behind it
        return False


def _unrecognized(argument: str) -> str:
    return f"{argument}: unrecognized argument; see --help"


def _fail(error: BaseException, with_traceback: bool) -> int:
    world = _world()
    failure = FailureReport.of(error, world.rank)
    if REPORTS in os.environ:
        failure.leave(os.environ[REPORTS])
        return failure.exit_code
    if with_traceback:
        traceback.print_exception(error)
    if with_traceback or _should_print(failure, world):
        print(f"error: {failure.message}", file=sys.stderr, flush=True)
    return failure.exit_code


def _world() -> World:
    """This rank's place, or a single rank if the environment variables are invalid."""
    try:
        return World.from_environment()
    except LaunchError:
        return World()


def _should_print(failure: FailureReport, world: World) -> bool:
    """Whether this rank prints its error. Once the ranks are connected, only the first to fail does. Before that, wrong
    usage fails on every rank, and one rank of each node prints it. Another error, such as a missing device, may be one
    rank's alone: the first rank of a node prints it at once, the others only if the launcher (torchrun does) has not
    ended them by then."""
    context = sys.modules.get("stepmark.runtime.context")
    distributed = sys.modules.get("torch.distributed")
    if context is not None and distributed is not None and distributed.is_initialized():
        return bool(context.first_to_fail())
    if failure.exit_code != UsageError.exit_code and world.local_rank > 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(OTHERS_FIRST)
        return True
    return world.local_rank == 0
