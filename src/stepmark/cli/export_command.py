"""`stepmark export CHECKPOINT_OR_RUN OUT --to dcp|hf-trainer [--titan] [--config FILE] [--json]`"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepmark.interchange.sinks.export_plan import ExportOptions

HELP = "write a checkpoint as another tool's, so that the other tool continues training from it"
REMOVED = {"optimum-neuron": "optimum-neuron", "nxd": "neuronx-distributed"}  # --to -> the tool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="CHECKPOINT_OR_RUN",
        type=Path,
        help="a checkpoint-N folder, or a run's folder: its newest checkpoint",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to make; it must not exist, or be empty")
    parser.add_argument(
        "--to",
        required=True,
        choices=("dcp", "hf-trainer", *REMOVED),
        metavar="{dcp,hf-trainer}",
        help="dcp: torch.distributed.checkpoint; hf-trainer: transformers' Trainer",
    )
    for name in ("--tp", "--pp", "--dp"):  # of the formats that were removed
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    parser.add_argument(
        "--titan",
        action="store_true",
        help="a Llama under torchtitan's names, in torchtitan's order of rows (dcp only)",
    )
    parser.add_argument(
        "--config", metavar="FILE", type=Path, help="the model's config.json, or its folder, where CHECKPOINT has none"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for machines")


def options_of(parsed: argparse.Namespace) -> ExportOptions:
    """What the user asks for. Raises UsageError for an option that the format does not have."""
    from stepmark.cli.import_command import config_file
    from stepmark.errors import UsageError
    from stepmark.interchange.sinks.export_plan import ExportOptions

    if parsed.to in REMOVED:
        raise UsageError(
            f"--to {parsed.to}: Stepmark no longer writes checkpoints of {REMOVED[parsed.to]}, whose development has "
            "ended; write the model with `stepmark consolidate`, and convert it there. --to dcp and --to hf-trainer "
            "take the optimizer along"
        )
    for name in ("tp", "pp", "dp"):
        if getattr(parsed, name) is not None:
            raise UsageError(f"--{name} has no meaning for {parsed.to}, whose files are of no mesh; leave it out")
    if parsed.titan and parsed.to != "dcp":
        raise UsageError(f"--titan is for --to dcp, and has no meaning for {parsed.to}")
    return ExportOptions(parsed.titan, config_file(parsed.config))


def run(parsed: argparse.Namespace) -> int:
    """Exports and reports it; returns 0. Raises StepmarkError; then nothing was written."""
    from stepmark.cli.progress import BytesProgress
    from stepmark.config.quiet_libraries import leave_out_torch_xla
    from stepmark.interchange.export_checkpoint import export_checkpoint
    from stepmark.interchange.sinks.stepmark_checkpoint import ImportListener

    leave_out_torch_xla()
    progress = BytesProgress("exporting")
    try:
        listener = ImportListener(progress.begin, progress.advance)
        done = export_checkpoint(parsed.source, parsed.out, parsed.to, options_of(parsed), listener)
    finally:
        progress.close()
    if parsed.json:
        body = {"source": str(done.checkpoint), "to": parsed.to, "out": str(parsed.out), "step": done.step}
        print(json.dumps({**body, "bytes": done.size, "notes": done.notes, "lost": done.lost}, indent=2))
        return 0
    print(f"{done.checkpoint}, step {done.step}, exported to {parsed.out}: {done.size / 1e6:,.1f} MB")
    for text in done.notes:
        print(f"  note: {text}")
    for text in done.lost:
        print(f"  not taken: {text}")
    return 0
