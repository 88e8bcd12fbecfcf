"""What is read from an address: it is downloaded to a folder, and verified on the way."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stepmark.checkpoint.format.checkpoint_folders import checkpoint_path
from stepmark.checkpoint.format.manifest import MANIFEST
from stepmark.checkpoint.places import BucketPlace, FolderPlace, copy_checkpoint, copy_others, explained, place_of
from stepmark.errors import CheckpointDamaged, CheckpointNotFound
from stepmark.filesystem import files
from stepmark.filesystem.cache_folder import cache_root
from stepmark.filesystem.local_paths import NEWEST, OBJECTS, RECORDS, address_of
from stepmark.filesystem.locks import try_lock
from stepmark.filesystem.objects import Bucket

_WEIGHTS = (".safetensors", ".bin", ".pt")  # of a run's final model, which is not read with its run
_LOCKED = 0.5  # seconds between two looks at another process's download

logger = logging.getLogger("stepmark")
models: dict[str, str] = {}  # by address, the paths of those that this process reads


def download(
    address: str,
    folder: Path,
    what: str = NEWEST,
    begin: Callable[[int], object] = lambda total: None,
    advance: Callable[[int], object] = lambda count: None,
) -> Path:
    """Downloads what is needed of a run, or a checkpoint, into a folder, and returns its path there. A checkpoint that
    its run deletes meanwhile is left out; where the newest is needed, also one that is damaged. Raises
    CheckpointNotFound, CheckpointDamaged, or CheckpointError for what else goes wrong."""
    with explained(address):
        source, step = (BucketPlace(Bucket(address)), None) if what == OBJECTS else place_of(address)
        run = folder / Path(source.address).name
        steps = [step] if step is not None else [] if what == OBJECTS else source.steps()
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
        if what == NEWEST or not (steps or others):
            raise CheckpointNotFound(f"{address}: there is {'no complete checkpoint' if what == NEWEST else 'nothing'}")
        wanted = {name: each for name, each in others.items() if not steps or not name.endswith(_WEIGHTS)}
        copy_others(source, FolderPlace(run), wanted, begin, advance)
        return run


def checkpoint_copy(address: str, needs: Callable[[Path], set[int]] = lambda path: set()) -> Path:
    """The checkpoint at an address, or the newest of the run there, in the cache; with those that `needs(path)` names.
    Raises as `download`."""
    place, _ = place_of(address)
    with explained(address), _folder_of(place.address) as folder:
        path = download(address, folder)
        for other in needs(path).intersection(place.steps()):
            copy_checkpoint(place, FolderPlace(path.parent), other, replaces=True)
        return path


def local_model(name: str) -> str:
    """A model's path or name; of the address of a Hugging Face folder or a checkpoint, the path of its copy in the
    cache, which stays the same in a process. Raises as `download`."""
    if (address := address_of(name)) is None or address in models:
        return models.get(address or "", name)
    (run, step), bucket = place_of(address), Bucket(address)
    with explained(address), _folder_of(run.address) as folder:
        if step is not None and bucket.stat(MANIFEST) is not None:
            path = download(address, folder)
        else:
            found = sorted(BucketPlace(bucket).others().items())
            version = hashlib.sha256(repr(found).encode()).hexdigest()[:16]
            path = download(address, folder / version, OBJECTS)
    return models.setdefault(address, str(path))


def address_of_copy(path: str) -> str:
    """The address from which this process has downloaded the model at a path; else the path."""
    return next((address for address, copy in models.items() if copy == path), path)


@contextmanager
def _folder_of(address: str) -> Iterator[Path]:
    """The folder in the cache for what is at an address; one process at a time has it."""
    folder = cache_root() / "downloads" / address.replace("://", "/")
    files.make_folder(folder)
    logger.info("%s is read by way of %s", address, folder)
    with files.open_for_appending(folder / ".lock") as file:
        while try_lock(file.fileno()) is False:
            time.sleep(_LOCKED)
        yield folder
