"""`stepmark verify CHECKPOINT_OR_RUN`"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepmark.cli.inspect import CONFIG_HELP

if TYPE_CHECKING:
    from stepmark.checkpoint.format.verify import VerifyReport

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

    if is_foreign(parsed.path):
        return verify_foreign(parsed.path, parsed.config, parsed.json)
    reports = []
    for path in reversed(find_checkpoints(parsed.path)):
        with reading(path, "verify") as there:
            if not there and path != parsed.path:  # the run has deleted it since
                continue
            report = verify(path)
        reports.append(report)
        if not parsed.json:
            _show(report)
    if parsed.json:
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
