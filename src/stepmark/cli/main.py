"""Parses the command line, runs the command, and turns errors into one line and an exit code.

Exit codes: 0 done; 1 failed, or a check found errors; 2 wrong usage; 75 interrupted and resumable.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import select
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import stepmark
from stepmark.cli.fetched import fetched
from stepmark.config.refusals import refusals
from stepmark.errors import LaunchError, PeerLost, UsageError
from stepmark.filesystem.local_paths import local_path
from stepmark.filesystem.printable import PrintableOutput, printable_record
from stepmark.launch.signal_handlers import raise_keyboard_interrupts
from stepmark.launch.signal_listener import RunInterrupted
from stepmark.launch.world import World
from stepmark.liveness.failure_report import OUTPUT_CLOSED, FailureReport
from stepmark.liveness.process_exit import reported

_MODULES = (
    "init train precompile evaluate consolidate import_command export_command copy_command inspect plan doctor report "
    "rows verify cache stop drill"
)
COMMANDS = {name.removesuffix("_command"): importlib.import_module(f"stepmark.cli.{name}") for name in _MODULES.split()}
OTHERS_FIRST = 1.5  # seconds that a rank waits for the first rank of its node


class _Parser(argparse.ArgumentParser):
    """Raises UsageError instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")

    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse passes over errors of writing, and a reader that has gone is one."""
        if message:
            (file or sys.stderr).write(message)


def build_parser() -> argparse.ArgumentParser:
    text, plain = Path(__file__).with_name("overview.txt"), argparse.RawDescriptionHelpFormatter
    overview = text.read_text(encoding="utf-8")
    parser = _Parser("stepmark", "%(prog)s COMMAND ...", overview, formatter_class=plain, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"stepmark {stepmark.__version__}")
    listed: dict[str, Any] = {"metavar": "COMMAND", "prog": "stepmark", "help": argparse.SUPPRESS}  # in the overview
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser, **listed)
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, description=module.HELP, allow_abbrev=False)
        command.add_argument("--traceback", action="store_true", help="print the Python traceback of an error")
        module.add_arguments(command)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit code. Raises BrokenPipeError if the reader of stdout has gone."""
    with_traceback, called = "--traceback" in arguments, False
    try:
        _check_not_gone(arguments)
        parsed, unknown = build_parser().parse_known_args(arguments)
        command = COMMANDS[parsed.command]
        if unknown:
            explain = getattr(parsed, "explain_unknown", "{}: unrecognized argument; see --help".format)
            raise UsageError(explain(unknown[0]))
        takes = getattr(command, "TAKES", {})
        for name, value in vars(parsed).items():
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, Path) and name not in takes:
                    local_path(each, name)
        parsed.arguments = list(arguments)
        if not getattr(command, "ENDS_AT_SIGNALS", False):
            raise_keyboard_interrupts()
        logging.getLogger("stepmark").addFilter(printable_record)
        with contextlib.redirect_stdout(sys.stdout and PrintableOutput(sys.stdout)), fetched(parsed, takes):
            called = True
            return int(command.run(parsed))
    except BrokenPipeError as error:
        if not _output_is_closed():
            return _fail(error, with_traceback)
        reported(FailureReport(_world().rank, OUTPUT_CLOSED, "", 1, False, time.time()))
        raise
    except (KeyboardInterrupt, SystemExit, Exception) as error:
        if isinstance(error, RunInterrupted) or (isinstance(error, SystemExit) and not called):  # of --help
            raise
        return _fail(error, with_traceback)  # also where a user's code exits with 0, which would say: done


def _check_not_gone(arguments: Sequence[str]) -> None:
    """Raises UsageError for a command, an option of it or a value of an option that Stepmark had."""
    command, words = arguments[:1], [word for each in arguments[1:] for word in each.split("=", 1)]
    for names in ((), *pairwise(words), *zip(words, strict=True)):
        if instead := refusals("gone").get(" ".join((*command, *names))):
            raise UsageError(f"{' '.join(names or command)}: is gone; {instead}")


def _output_is_closed() -> bool:
    """Whether stdout is a pipe whose reader has gone."""
    with contextlib.suppress(OSError, ValueError):  # no descriptor behind it
        pipe = select.poll()
        pipe.register(sys.stdout.fileno(), select.POLLOUT)
        return any(events & select.POLLERR for _, events in pipe.poll(0))
    return False


def _fail(error: BaseException, with_traceback: bool) -> int:
    world = _world()
    failure = FailureReport.of(error, world.rank)
    if reported(failure):
        return failure.exit_code
    if with_traceback:
        traceback.print_exception(error)
    if with_traceback or _should_print(failure, world) or _prints_for_lost_server(error, world):
        print(f"error: {failure.message}", file=sys.stderr, flush=True)
    return failure.exit_code


def _world() -> World:
    """This rank's place, or a single rank if the environment variables are invalid."""
    try:
        return World.from_environment()
    except LaunchError:
        return World()


def _prints_for_lost_server(error: BaseException, world: World) -> bool:
    """Whether this rank prints that rank 0, which served the ranks' store, is gone: the first one left on each node."""
    context = sys.modules.get("stepmark.runtime.context")
    first = 1 if world.node == 0 else 0
    return isinstance(error, PeerLost) and world.local_rank == first and not (context and context.store_answers())


def _should_print(failure: FailureReport, world: World) -> bool:
    """Whether this rank prints its error: of connected ranks the first to fail does. Before that, one rank of each node
    prints wrong usage, which fails on all. Another error, such as a missing device, may be one rank's alone: a node's
    first rank prints it at once, the others only if the launcher (torchrun does) has not ended them by then."""
    context = sys.modules.get("stepmark.runtime.context")
    distributed = sys.modules.get("torch.distributed")
    if context is not None and distributed is not None and distributed.is_initialized():
        return bool(context.first_to_fail())
    if failure.exit_code != UsageError.exit_code and world.local_rank > 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(OTHERS_FIRST)
        return True
    return world.local_rank == 0
