"""`stepmark copy SOURCE DESTINATION`"""

from __future__ import annotations

import argparse

HELP = "copy a run, or one checkpoint, between folders and object storage, and verify every checksum on the way"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = "a path, or an address (s3://, gs://, az://)"
    parser.add_argument("source", metavar="SOURCE", help=f"a run's folder, or a checkpoint-N in it: {kinds}")
    parser.add_argument("destination", metavar="DESTINATION", help=f"the run's folder there, made if missing: {kinds}")


def run(parsed: argparse.Namespace) -> int:
    """Returns 0. Raises as `stepmark.checkpoint.places.copy` does."""
    from stepmark.checkpoint.places import copy, place_of
    from stepmark.cli.progress import BytesProgress
    from stepmark.errors import UsageError

    source, step = place_of(parsed.source)
    destination, named = place_of(parsed.destination)
    if named not in (None, step):
        raise UsageError(f"{parsed.destination}: name the run's folder, which checkpoints keep their names in")
    with BytesProgress("copying") as listener:
        for copied in copy(source, destination, step, begin=listener.begin, advance=listener.advance):
            what = f"checkpoint-{copied.step}" if copied.step is not None else "beside checkpoints"
            files = f"{copied.files} file{'s' if copied.files != 1 else ''}"
            how = f"{copied.sent / 1e6:,.1f} MB copied" if copied.sent else "there already"
            print(f"{destination.address}: {what}: {files}, {how}", flush=True)
    return 0
