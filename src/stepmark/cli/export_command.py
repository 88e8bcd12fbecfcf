"""`stepmark export CHECKPOINT_OR_RUN OUT --to dcp|hf-trainer|optimum-neuron|nxd [--tp N] [--pp N] [--dp N] [--json]`"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepmark.interchange.sinks.export_plan import ExportOptions

HELP = "write a checkpoint as another tool's, so that the other tool continues training from it"
NEURON = ("optimum-neuron", "nxd")


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
        choices=("dcp", "hf-trainer", *NEURON),
        help="dcp: torch.distributed.checkpoint; hf-trainer: transformers' Trainer; nxd: neuronx-distributed",
    )
    parser.add_argument("--tp", metavar="N", type=int, help="tensor parallel ranks (Neuron formats; default: 1)")
    parser.add_argument("--pp", metavar="N", type=int, help="pipeline stages (Neuron formats; default: 1)")
    parser.add_argument(
        "--dp", metavar="N", type=int, help="data parallel ranks that share the optimizer by ZeRO-1 (nxd only)"
    )
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

    allowed = {"tp": NEURON, "pp": NEURON, "dp": ("nxd",), "titan": ("dcp",)}
    for name, formats in allowed.items():
        value = getattr(parsed, name)
        if value not in (None, False) and parsed.to not in formats:
            raise UsageError(f"--{name} is for --to {' or '.join(formats)}, and has no meaning for {parsed.to}")
        if type(value) is int and value < 1:
            raise UsageError(f"--{name} must be at least 1, but is {value}")
    return ExportOptions(parsed.tp or 1, parsed.pp or 1, parsed.dp, parsed.titan, config_file(parsed.config))


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
