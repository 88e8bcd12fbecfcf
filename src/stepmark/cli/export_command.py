"""`stepmark export CHECKPOINT_OR_RUN OUT --to dcp|hf-trainer|optimum-neuron|nxd [--tp N] [--pp N] [--dp N] [--json]`"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepmark.interchange.exported import ExportOptions

HELP = "write a checkpoint in the format of another tool, which can continue training from it"
NEURON = ("optimum-neuron", "nxd")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    source = "a checkpoint-N folder, or a run's folder (its newest checkpoint)"
    add("source", metavar="CHECKPOINT_OR_RUN", type=Path, help=source)
    add("out", metavar="OUT", type=Path, help="output folder; must not exist, or be empty")
    formats = "dcp: torch.distributed.checkpoint; hf-trainer: transformers' Trainer; nxd: neuronx-distributed"
    add("--to", required=True, choices=("dcp", "hf-trainer", *NEURON), help=formats)
    add("--tp", metavar="N", type=int, help="tensor parallel ranks (Neuron formats; default: 1)")
    add("--pp", metavar="N", type=int, help="pipeline stages (Neuron formats; default: 1)")
    add("--dp", metavar="N", type=int, help="data parallel ranks that shard the optimizer by ZeRO-1 (nxd only)")
    add("--titan", action="store_true", help="a Llama with torchtitan's names and order of rows (dcp only)")
    config = "config.json of the model, or its folder, if CHECKPOINT has none"
    add("--config", metavar="FILE", type=Path, help=config)
    add("--json", action="store_true", help="print JSON")


def options_of(parsed: argparse.Namespace) -> ExportOptions:
    """What the user asks for. Raises UsageError for an option that the format does not have."""
    from stepmark.cli.import_command import config_file
    from stepmark.errors import UsageError
    from stepmark.interchange.exported import ExportOptions

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
    from stepmark.interchange.import_checkpoint import ImportListener

    leave_out_torch_xla()
    with BytesProgress("exporting") as progress:
        listener = ImportListener(progress.begin, progress.advance)
        done = export_checkpoint(parsed.source, parsed.out, parsed.to, options_of(parsed), listener)
    if parsed.json:
        body = {"source": str(done.checkpoint), "to": parsed.to, "out": str(parsed.out), "step": done.step}
        print(json.dumps({**body, "bytes": done.size, "notes": done.notes, "lost": done.lost}, indent=2))
        return 0
    print(f"{done.checkpoint}, step {done.step}, exported to {parsed.out}: {done.size / 1e6:,.1f} MB")
    for kind, texts in (("note", done.notes), ("not taken", done.lost)):
        for text in texts:
            print(f"  {kind}: {text}")
    return 0
