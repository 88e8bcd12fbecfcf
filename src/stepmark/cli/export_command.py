"""`stepmark export CHECKPOINT_OR_RUN OUT --to hf|dcp|hf-trainer [--titan] [--config FILE] [--json]`"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from stepmark.errors import UsageError
from stepmark.filesystem.local_paths import NEWEST
from stepmark.liveness.gc_pause import without_collection

TAKES = {"source": NEWEST}
HELP = "write a checkpoint in the format of another tool, which can continue training from it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    source = "a checkpoint-N folder, or a run's folder (its newest checkpoint)"
    add("source", metavar="CHECKPOINT_OR_RUN", type=Path, help=source)
    add("out", metavar="OUT", type=Path, help="output folder; must not exist, or be empty")
    told = "hf: a model folder, as `stepmark consolidate` writes it; dcp: torch.distributed.checkpoint; "
    told += "hf-trainer: transformers' Trainer"
    add("--to", required=True, choices=("hf", "dcp", "hf-trainer"), help=told)
    add("--titan", action="store_true", help="a Llama with torchtitan's names and order of rows (dcp only)")
    config = "config.json of the model, or its folder, if CHECKPOINT has none"
    add("--config", metavar="FILE", type=Path, help=config)
    add("--json", action="store_true", help="print JSON")


@without_collection()
def run(parsed: argparse.Namespace) -> int:
    """Exports and reports it; returns 0. Raises StepmarkError; then nothing was written."""
    from stepmark.cli.import_command import config_file
    from stepmark.cli.progress import BytesProgress
    from stepmark.config.quiet_libraries import leave_out_torch_xla
    from stepmark.interchange.export_checkpoint import export_checkpoint

    leave_out_torch_xla()
    if parsed.titan and parsed.to != "dcp":
        raise UsageError(f"--titan is for --to dcp, and has no meaning for {parsed.to}")
    given = {"titan": parsed.titan, "config": config_file(parsed.config)}
    with BytesProgress("exporting") as listener:
        done = export_checkpoint(parsed.source, parsed.out, parsed.to, listener, **given)
    if parsed.json:
        body = {"source": str(done.checkpoint), "to": parsed.to, "out": str(parsed.out), "step": done.step}
        print(json.dumps({**body, "bytes": done.size, "notes": done.notes, "lost": done.lost}, indent=2))
        return 0
    print(f"{done.checkpoint}, step {done.step}, exported to {parsed.out}: {done.size / 1e6:,.1f} MB")
    for kind, texts in (("note", done.notes), ("not taken", done.lost)):
        for text in texts:
            print(f"  {kind}: {text}")
    return 0
