"""`stepmark cache [FOLDER] [--clear] [--retry-failed] [--dry-run] [--json]`"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepmark.errors import UsageError
from stepmark.filesystem.cache_folder import cache_root

if TYPE_CHECKING:
    from stepmark.preflight.compile_cache import CacheEntry

HELP = "list and clear the caches of compiled graphs and tokenized data"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    where = "a compile_cache folder (default: $STEPMARK_CACHE or ~/.cache/stepmark)"
    add("folder", nargs="?", metavar="FOLDER", help=where)
    add("--clear", action="store_true", help="delete all entries that no run is using")
    add("--retry-failed", action="store_true", help="forget failed compilations, so that the next run retries them")
    add("--dry-run", action="store_true", help="show what would be deleted")
    add("--json", action="store_true", help="print JSON")


def run(parsed: argparse.Namespace) -> int:
    """Returns 0. Raises UsageError for a folder that is not there."""
    from stepmark.preflight.compile_cache import FAILED, PROTECTED, delete, find_entries

    folder = _folder(parsed.folder)
    entries, chosen = find_entries(folder), []
    if parsed.clear:
        chosen = [entry for entry in entries if entry.state not in PROTECTED]
    elif parsed.retry_failed:  # which the compiler tries again once they have gone
        chosen = [entry for entry in entries if entry.state == FAILED]
    gone = chosen if parsed.dry_run else [entry for entry in chosen if delete(entry)]
    left = [entry for entry in entries if entry not in gone]
    if parsed.json:
        shown = {"folder": str(folder), "entries": [_to_json(each) for each in left]}
        print(json.dumps({**shown, "deleted": [_to_json(each) for each in gone]}, indent=2))
    else:
        print("\n".join(_lines(folder, left, gone, parsed.dry_run)))
    return 0


def _folder(given: str | None) -> Path:
    if given is not None and "://" in given:
        raise UsageError(f"{given}: list and clear a cache in S3 with `aws s3`, or by a lifecycle rule of the bucket")
    folder = cache_root() if given is None else Path(given).expanduser()
    if given is not None and not folder.is_dir():
        raise UsageError(f"there is no folder {folder}")
    return folder


def _lines(folder: Path, left: Sequence[CacheEntry], gone: Sequence[CacheEntry], dry_run: bool) -> list[str]:
    kinds = dict.fromkeys(entry.kind for entry in left)
    by_kind = {kind: [entry for entry in left if entry.kind == kind] for kind in kinds}
    lines = [str(folder), *(f"  {kind}: {_summary(entries)}" for kind, entries in by_kind.items())]
    if not left:
        lines.append("  empty")
    if gone:
        lines.append(f"{'would delete' if dry_run else 'deleted'}: {_summary(gone)}")
        lines += [f"  {entry.path.relative_to(folder)}" for entry in gone]
    return lines


def _summary(entries: Sequence[CacheEntry]) -> str:
    states = Counter(entry.state for entry in entries)
    days = (time.time() - min(entry.used for entry in entries)) / 86400
    size = sum(entry.size for entry in entries) / 1e6
    counted = ", ".join(f"{count} {state}" for state, count in states.items())
    return f"{counted}; {size:.1f} MB; unused for {days:.1f} days at most"


def _to_json(entry: CacheEntry) -> dict[str, Any]:
    named = {"path": str(entry.path), "kind": entry.kind, "state": entry.state}
    return {**named, "bytes": entry.size, "used": entry.used}
