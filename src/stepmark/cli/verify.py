"""`stepmark verify CHECKPOINT_OR_RUN`"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from stepmark.cli.fetched import AS_IT_IS
from stepmark.cli.inspect import CONFIG_HELP

if TYPE_CHECKING:
    from stepmark.checkpoint.format.verify import VerifyReport

TAKES = {"path": AS_IT_IS}
HELP = "read every byte of a checkpoint, or of all checkpoints of a run, and verify checksums"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="CHECKPOINT_OR_RUN", type=Path, help="a checkpoint-N folder, or a run's folder")
    parser.add_argument("--config", metavar="FILE", type=Path, help=CONFIG_HELP)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(parsed: argparse.Namespace) -> int:
    """Returns 0 where every checkpoint is intact, else 1."""
    from stepmark.checkpoint.coordination.leases import reading
    from stepmark.checkpoint.format.checkpoint_folders import find_checkpoints
    from stepmark.checkpoint.format.verify import verify
    from stepmark.cli.foreign_checkpoints import is_foreign, verify_foreign
    from stepmark.filesystem.local_paths import address_of

    if (address := address_of(parsed.path)) is not None:
        from stepmark.checkpoint.places import verify_there

        return _end(verify_there(address), parsed.json)
    if is_foreign(parsed.path):
        return verify_foreign(parsed.path, parsed.config, parsed.json)

    def verified() -> Iterator[VerifyReport]:
        for path in reversed(find_checkpoints(parsed.path)):
            with reading(path, "verify") as there:
                if there or path == parsed.path:  # else the run has deleted it since
                    yield verify(path)

    return _end(verified(), parsed.json)


def _end(found: Iterable[VerifyReport], as_json: bool) -> int:
    """Prints each report as it comes, or as JSON all of them; returns the exit code."""
    reports = []
    for report in found:
        count = len(report.faults)
        told = {"path": str(report.path), "step": report.step, "bytes": report.size, "good": not count}
        reports.append({**told, "faults": [asdict(fault) for fault in report.faults]})
        good = f"good, {report.size / 1e6:.1f} MB read"
        state = f"corrupted, {count} fault{'s' if count > 1 else ''}" if count else good
        if not as_json:
            print("\n".join([f"{report.path}: {state}", *(f"  {fault}" for fault in report.faults)]))
    if as_json:
        print(json.dumps({"checkpoints": reports}, indent=2))
    return 0 if all(report["good"] for report in reports) else 1
