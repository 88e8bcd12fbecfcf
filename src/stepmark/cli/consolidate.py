"""`stepmark consolidate CHECKPOINT_OR_RUN OUT [-f safetensors|pytorch] [--max-shard-size 5GB]
[--merge-adapters [--base-model MODEL]]`"""

from __future__ import annotations

import argparse
from pathlib import Path

from stepmark.errors import UsageError

HELP = "turn a checkpoint, sharded or not, into a plain Hugging Face model folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="CHECKPOINT_OR_RUN",
        type=Path,
        help="a checkpoint-N folder, or a run's folder: its newest complete checkpoint; also one of another tool",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to make; it must not exist, or be empty")
    parser.add_argument(
        "-f", "--format", choices=("safetensors", "pytorch"), default="safetensors", help="of the files"
    )
    parser.add_argument(
        "--merge-adapters",
        action="store_true",
        help="of a checkpoint with an adapter of PEFT: write the complete model, the adapter merged into its base",
    )
    parser.add_argument(
        "--base-model",
        metavar="MODEL",
        help="the adapter's base model, a folder or a name on the hub (default: the one its configuration names)",
    )
    parser.add_argument("--max-shard-size", metavar="SIZE", default="5GB", help="of tensors in a file (default: 5GB)")


def run(parsed: argparse.Namespace) -> int:
    """Writes the folder and reports it; returns 0. Raises as `consolidate` does, and UsageError for a flag without the
    one that it belongs to."""
    from stepmark.cli.foreign_checkpoints import consolidate_foreign, is_foreign
    from stepmark.cli.progress import BytesProgress
    from stepmark.model_folder.consolidate import ConsolidationListener, consolidate
    from stepmark.model_folder.merge_adapter import Merge
    from stepmark.model_folder.model_files import parse_size

    if parsed.base_model is not None and not parsed.merge_adapters:
        raise UsageError("--base-model: it is only needed with --merge-adapters")
    merge = Merge(parsed.base_model) if parsed.merge_adapters else None
    size = parse_size(parsed.max_shard_size)
    if is_foreign(parsed.source):
        return consolidate_foreign(parsed, size)
    progress = BytesProgress("consolidating")
    try:
        listener = ConsolidationListener(progress.begin, progress.advance, progress.warn)
        done = consolidate(parsed.source, parsed.out, parsed.format, size, listener, merge)
    finally:
        progress.close()
    count = len(done.shards)
    size_text = f"{done.size / 1e6:,.1f} MB in {count} file{'s' if count > 1 else ''}"
    print(f"{done.checkpoint} consolidated into {parsed.out}: {size_text}")
    return 0
