"""What a command reads from object storage: it is on this machine for as long as the command runs."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from stepmark.filesystem.cache_folder import fetched_root
from stepmark.filesystem.files import make_folder
from stepmark.filesystem.local_paths import address_of

AS_IT_IS = "the address"  # which the command reads itself


@contextlib.contextmanager
def fetched(parsed: argparse.Namespace, takes: Mapping[str, str]) -> Iterator[None]:
    """Inside the block, paths of this machine are in place of the addresses in `parsed`, also in `parsed.arguments`;
    `takes` says which of its values may be addresses, and what is needed of a run. Raises StepmarkError."""
    found = {name: value for name in takes if (value := getattr(parsed, name)) and takes[name] != AS_IT_IS}
    addresses = {
        (name, path): address
        for name, value in found.items()
        for path in (value if isinstance(value, list) else [value])
        if (address := address_of(path)) is not None
    }
    if not addresses:
        yield
        return
    from stepmark.checkpoint.downloads import download
    from stepmark.cli.progress import BytesProgress

    make_folder(fetched_root())
    with TemporaryDirectory(dir=fetched_root()) as folder:
        local: dict[Any, Path] = {}
        with BytesProgress("downloading") as listener:
            for number, ((name, path), address) in enumerate(addresses.items()):
                where = Path(folder) / str(number)
                if getattr(parsed, "watch", False):
                    from stepmark.watcher.followed_run import FollowedRun

                    local[path] = FollowedRun(where / address.replace("://", "/")).begin()
                else:
                    local[path] = download(address, where, takes[name], listener.begin, listener.advance)
        for name, value in found.items():
            setattr(
                parsed, name, [local.get(p, p) for p in value] if isinstance(value, list) else local.get(value, value)
            )
        parsed.fetched = {str(local[path]): address for (_, path), address in addresses.items()}
        paths = {str(path): str(place) for path, place in local.items()}
        parsed.arguments = [paths.get(str(Path(each)), each) for each in parsed.arguments]
        yield
