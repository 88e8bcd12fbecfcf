"""`stepmark consolidate CHECKPOINT_OR_RUN OUT [-f safetensors|pytorch] [--max-shard-size 5GB]
[--merge-adapters [--base-model MODEL]]`"""

from __future__ import annotations

import argparse
from pathlib import Path

from stepmark.errors import UsageError
from stepmark.filesystem.local_paths import NEWEST

TAKES = {"source": NEWEST}
HELP = "convert a checkpoint, sharded or not, to a plain Hugging Face model folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    source = "a checkpoint-N folder, or a run's folder (its newest complete checkpoint); also of another tool"
    add("source", metavar="CHECKPOINT_OR_RUN", type=Path, help=source)
    add("out", metavar="OUT", type=Path, help="output folder; must not exist, or be empty")
    formats = ("safetensors", "pytorch")
    add("-f", "--format", choices=formats, default="safetensors", help="format of the files (default: safetensors)")
    merge = "write the complete model, with a PEFT adapter merged into its base model"
    add("--merge-adapters", action="store_true", help=merge)
    base = "an adapter's base model: a folder, an address or a name of the hub (default: as in its configuration)"
    add("--base-model", metavar="MODEL", help=base)
    add("--max-shard-size", metavar="SIZE", default="5GB", help="maximum size of a file (default: 5GB)")


def run(parsed: argparse.Namespace) -> int:
    """Writes the folder, reports it, returns 0. Raises as `consolidate`, and UsageError where a flag needs another."""
    from stepmark.cli.foreign_checkpoints import consolidate_foreign, is_foreign
    from stepmark.cli.progress import BytesProgress
    from stepmark.model_folder.consolidate import consolidate
    from stepmark.model_folder.model_files import parse_size

    if parsed.base_model is not None and not parsed.merge_adapters:
        raise UsageError("--base-model: it is only needed with --merge-adapters")
    merge = parsed.base_model or "" if parsed.merge_adapters else None
    size = parse_size(parsed.max_shard_size)
    if is_foreign(parsed.source):
        return consolidate_foreign(parsed, size)
    with BytesProgress("consolidating") as listener:
        done = consolidate(parsed.source, parsed.out, parsed.format, size, listener, merge)
    files = f"{len(done.shards)} file{'s' if len(done.shards) > 1 else ''}"
    address = getattr(parsed, "fetched", {}).get(str(parsed.source))
    inside = "" if address is None or address.endswith(done.checkpoint.name) else f"/{done.checkpoint.name}"
    print(f"{address or done.checkpoint}{inside} consolidated into {parsed.out}: {done.size / 1e6:,.1f} MB in {files}")
    return 0
