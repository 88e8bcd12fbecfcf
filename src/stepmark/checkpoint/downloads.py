"""What is read from an address: it is downloaded to a folder, and verified on the way."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from stepmark.checkpoint.format.checkpoint_folders import checkpoint_path
from stepmark.checkpoint.format.manifest import MANIFEST
from stepmark.checkpoint.places import BucketPlace, FolderPlace, copy_checkpoint, copy_others, explained, place_of
from stepmark.errors import CheckpointDamaged, CheckpointNotFound
from stepmark.filesystem import files
from stepmark.filesystem.cache_folder import cache_root
from stepmark.filesystem.local_paths import NEWEST, RECORDS, address_of
from stepmark.filesystem.locks import try_lock
from stepmark.filesystem.objects import Bucket

_WEIGHTS = (".safetensors", ".bin", ".pt")  # of a run's final model, which is not read with its run
_LOCKED = 0.5  # seconds between two looks at another process's download

logger = logging.getLogger("stepmark")
_models: dict[str, Path] = {}  # by address, those that this process reads


def download(
    address: str,
    folder: Path,
    what: str = NEWEST,
    begin: Callable[[int], object] = lambda total: None,
    advance: Callable[[int], object] = lambda count: None,
) -> Path:
    """Downloads what is needed of a run, or a checkpoint, into a folder, and returns its path there. A checkpoint that
    its run deletes meanwhile is left out; where the newest is needed, the one before it is taken, also for a damaged
    one.

    Raises CheckpointNotFound, CheckpointDamaged, or CheckpointError for what else goes wrong.
    """
    with explained(address):
        source, step = place_of(address)
        run = folder / Path(source.address).name
        steps = [step] if step is not None else source.steps()
        others = source.others() if step is None and what != NEWEST else {}
        for each in steps:
            try:
                if step is None and what == RECORDS:
                    files.make_folder(checkpoint_path(run, each))
                    files.write_file(checkpoint_path(run, each) / MANIFEST, source.manifest(each), durable=False)
                else:
                    copy_checkpoint(source, FolderPlace(run), each, begin, advance, replaces=True)
            except (CheckpointNotFound, FileNotFoundError, CheckpointDamaged) as error:
                damaged = isinstance(error, CheckpointDamaged)
                if step is not None or (what != NEWEST if damaged else each in source.steps()):
                    raise
                logger.warning("checkpoint-%d is left out: %s", each, error if damaged else "its run has deleted it")
            else:
                if step is not None or what == NEWEST:
                    return checkpoint_path(run, each)
        if not others:
            raise CheckpointNotFound(f"{address}: {'no checkpoint is left' if steps else 'there is no run'}")
        wanted = {name: each for name, each in others.items() if not steps or not name.endswith(_WEIGHTS)}
        copy_others(source, FolderPlace(run), wanted, begin, advance)
        return run


def checkpoint_copy(address: str, needs: Callable[[Path], set[int]]) -> Path:
    """The checkpoint at an address, of a run its newest complete one, in the cache; beside it those that `needs(path)`
    names. Raises as `download`."""
    place, _ = place_of(address)
    with explained(address), _folder_of(place.address) as folder:
        path = download(address, folder)
        for other in needs(path).intersection(place.steps()):
            copy_checkpoint(place, FolderPlace(path.parent), other, replaces=True)
        return path


def model_copy(address: str) -> Path:
    """The model at an address, a Hugging Face folder or a checkpoint, in the cache. In one process it stays the same.

    Raises CheckpointNotFound where there is none, CheckpointError for what else goes wrong.
    """
    if address in _models:
        return _models[address]
    (run, step), bucket = place_of(address), Bucket(address)
    with explained(address), _folder_of(run.address) as folder:
        if step is not None and bucket.stat(MANIFEST) is not None:
            path = download(address, folder)
        else:
            source = BucketPlace(bucket)
            found = source.others()
            if not found:
                raise CheckpointNotFound(f"{address}: there is nothing")
            version = hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:16]
            path = folder / version / Path(address).name
            there = {name for name in found if files.regular_file_size(path / name) == found[name].size}
            copy_others(source, FolderPlace(path), {name: found[name] for name in found.keys() - there})
    return _models.setdefault(address, path)


def local_model(name: str) -> str:
    """A model's path or name; of an address, the path of its copy."""
    address = address_of(name)
    return name if address is None else str(model_copy(address))


def address_of_copy(path: str) -> str:
    """The address from which this process has downloaded the model at a path; else the path."""
    return next((address for address, copy in _models.items() if str(copy) == path), path)


def remember(copies: Mapping[str, str]) -> None:
    """Takes models from where another process has downloaded them to."""
    _models.update({address: Path(path) for address, path in copies.items()})


@contextmanager
def _folder_of(address: str) -> Iterator[Path]:
    """The folder in the cache for what is at an address; one process at a time has it."""
    folder = cache_root() / "downloads" / address.replace("://", "/")
    files.make_folder(folder)
    with files.open_for_appending(folder / ".lock") as file:
        while try_lock(file.fileno()) is False:
            time.sleep(_LOCKED)
        yield folder
