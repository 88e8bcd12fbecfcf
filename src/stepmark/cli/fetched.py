"""What a command reads from object storage: it is downloaded for as long as the command runs."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepmark.model_folder.new_folder import WritingListener

# What is needed of a run; of a checkpoint's address, that is the checkpoint.
NEWEST, ALL, RECORDS = "its newest checkpoint", "all of its checkpoints", "what is beside its checkpoints"
OBJECTS = "all that is there"  # of another tool
WEIGHTS = (".safetensors", ".bin", ".pt")  # of the final model, which no command reads with its run
AS_IT_IS = "the address"  # which the command reads itself


@contextlib.contextmanager
def fetched(parsed: argparse.Namespace, takes: Mapping[str, str]) -> Iterator[None]:
    """Inside the block, paths of this machine are in place of the addresses in `parsed`, also in `parsed.arguments`;
    `takes` says which of its values may be addresses, and what is needed of a run. Raises StepmarkError."""
    from stepmark.filesystem.local_paths import address_of

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
    from stepmark.cli.progress import BytesProgress
    from stepmark.filesystem.cache_folder import cache_root
    from stepmark.filesystem.files import make_folder

    root = cache_root() / "fetched"
    make_folder(root)
    with TemporaryDirectory(dir=root) as folder:
        local: dict[Any, Path] = {}
        with BytesProgress("downloading") as listener:
            for number, ((name, path), address) in enumerate(addresses.items()):
                local[path] = _fetch(address, takes[name], Path(folder) / str(number), listener)
        for name, value in found.items():
            setattr(
                parsed, name, [local.get(p, p) for p in value] if isinstance(value, list) else local.get(value, value)
            )
        paths = {str(path): str(place) for path, place in local.items()}
        parsed.arguments = [paths.get(str(Path(each)), each) for each in parsed.arguments]
        yield


def _fetch(address: str, what: str, folder: Path, listener: WritingListener) -> Path:
    """Downloads what a command needs into a folder, and returns the path to give it."""
    from stepmark.checkpoint.format.checkpoint_folders import checkpoint_path
    from stepmark.checkpoint.format.manifest import MANIFEST
    from stepmark.checkpoint.places import FolderPlace, copy_checkpoint, copy_objects, copy_others, place_of
    from stepmark.errors import CheckpointError, CheckpointNotFound
    from stepmark.filesystem import files

    source, step = place_of(address)
    run = folder / Path(source.address).name
    destination = FolderPlace(run)
    try:
        if what == OBJECTS:
            return copy_objects(address, run, listener.begin, listener.advance)
        steps = [step] if step is not None else source.steps()
        others = source.others() if step is None and what != NEWEST else {}
        if not steps and not others:
            raise CheckpointNotFound(f"{address}: there is no run")
        for each in steps[:1] if what == NEWEST else steps:
            if step is None and what == RECORDS:
                files.make_folder(checkpoint_path(run, each))
                files.write_file(checkpoint_path(run, each) / MANIFEST, source.manifest(each), durable=False)
            else:
                copy_checkpoint(source, destination, each, listener.begin, listener.advance)
        records = {name: each for name, each in others.items() if not name.endswith(WEIGHTS)}
        copy_others(source, destination, records, listener.begin, listener.advance)
    except OSError as error:
        raise CheckpointError(f"{error.filename or address}: {error.strerror or error}") from error
    return run if step is None else checkpoint_path(run, step)
