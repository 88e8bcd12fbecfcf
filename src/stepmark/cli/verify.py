"""`stepmark verify CHECKPOINT_OR_RUN`"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    reports = []
    for report in found:
        reports.append(report)
        if not as_json:
            _show(report)
    if as_json:
        print(json.dumps({"checkpoints": [_to_json(report) for report in reports]}, indent=2))
    return 1 if any(report.faults for report in reports) else 0


def _show(report: VerifyReport) -> None:
    if not report.faults:
        print(f"{report.path}: good, {report.size / 1e6:.1f} MB read")
        return
    count = len(report.faults)
    print(f"{report.path}: corrupted, {count} fault{'s' if count > 1 else ''}")
    for fault in report.faults:
        print(f"  {fault}")


def _to_json(report: VerifyReport) -> dict[str, Any]:
    return {
        "path": str(report.path),
        "step": report.step,
        "bytes": report.size,
        "good": not report.faults,
        "faults": [asdict(fault) for fault in report.faults],
    }
