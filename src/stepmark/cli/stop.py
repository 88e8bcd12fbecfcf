"""`stepmark stop RUN`"""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from pathlib import Path

from stepmark.cli.fetched import AS_IT_IS

TAKES = {"path": AS_IT_IS}
HELP = "ask a live run to stop after its next save, from which it can be resumed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN", help="a run's folder, or its address in object storage")
    parser.add_argument("--reason", metavar="TEXT", default="stepmark stop", help="what the run's status says then")


def run(parsed: argparse.Namespace) -> int:
    """Returns 0. Raises CheckpointNotFound where no run has begun, and UsageError where it has ended."""
    from stepmark.checkpoint.places import FolderPlace, explained, place_of
    from stepmark.errors import CheckpointNotFound, UsageError
    from stepmark.filesystem.json_files import parse_json
    from stepmark.trainer.interruption.run_end import STOP_REQUEST, ask_to_stop
    from stepmark.trainer.run_folder.status import ENDED, STATUS

    place, step = place_of(parsed.path)
    with explained(place.address):
        found, state = place.others().get(STATUS), None
        if step is not None or found is None:
            raise CheckpointNotFound(f"{parsed.path}: no run has begun there; name its folder, or its address")
        with suppress(ValueError, LookupError, TypeError):
            state = parse_json(b"".join(map(bytes, place.read_other(STATUS, found.size))))["state"]
        if state in ENDED:
            raise UsageError(f"{place.address}: the run has ended ({state})")
        if isinstance(place, FolderPlace):
            ask_to_stop(Path(parsed.path), parsed.reason)
        else:
            place.write_other(STOP_REQUEST, iter([json.dumps({"reason": parsed.reason}).encode()]))
    print(f"{place.address}: a live run will stop after its next save; one that is started again forgets this")
    return 0
