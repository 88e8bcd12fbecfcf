"""Where a run is kept: in a folder of this machine, or in a bucket; and how runs and checkpoints are copied.

In a bucket nothing is renamed, so a checkpoint is there exactly if its manifest is, which is made last:

checkpoint-N/manifest.json     the same bytes as in a folder
checkpoint-N/<save>/<file>     names that no other save has
checkpoint-N/left-<save>.json  the manifest of one that the run has left, or damaged-<save>.json
best                           the name of the best checkpoint: in a folder, a link
<file>                         what else is in the run's folder
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

from stepmark.checkpoint.coordination.bucket_claim import BucketClaim
from stepmark.checkpoint.coordination.folder_claim import held_by_another
from stepmark.checkpoint.coordination.leases import reading
from stepmark.checkpoint.format.checkpoint_folders import (
    BEST,
    COORDINATION,
    DAMAGED,
    LEFT,
    MANIFEST,
    best_step,
    checkpoint_path,
    checkpoints,
    point_best,
    publish,
    quarantine,
    step_of,
    temporary_path,
)
from stepmark.checkpoint.format.manifest import USUAL, FileEntry, Manifest, is_file_name, parse_manifest, save_of
from stepmark.checkpoint.format.streamed_check import checked
from stepmark.checkpoint.format.verify import Corruption, VerifyReport
from stepmark.errors import CheckpointBusy, CheckpointDamaged, CheckpointError, CheckpointNotFound, UsageError
from stepmark.filesystem import files
from stepmark.filesystem.json_files import parse_json
from stepmark.filesystem.local_paths import is_address
from stepmark.filesystem.objects import IN_FLIGHT, PART, Bucket

FILES = 3  # copied at a time
MEMORY = FILES * 2 * IN_FLIGHT * PART  # bytes that this takes, at most
_BESIDE = ".stepmark/beside.json"  # the names of what the owner has put beside checkpoints
_NAME = r"[0-9a-f]+-\d{6,}|[0-9a-f]{16}"  # of a save, as run_ownership and the Checkpointer choose it
_SAVE = re.compile(rf"({_NAME})\Z")
ANOTHER = "{}/checkpoint-{} is another checkpoint of that step; delete it, or name another destination"
_TIME = r"(?:19|20)\d\d[01]\d[0-3]\d-|\d{16}"  # such a name is others', of a date and time
_OF_SAVE = re.compile(rf"checkpoint-\d+/(?:(?:{LEFT}|{DAMAGED})-)?(?!{_TIME})({_NAME})(\.json\Z|/)")


logger = logging.getLogger("stepmark")


class Other(NamedTuple):
    """A file beside the checkpoints: its size in bytes, and when it was written, in seconds since the Unix epoch."""

    size: int
    time: float


class FolderPlace:
    """A run's folder on this machine. What cannot be read or written raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.address = str(folder)

    def steps(self) -> list[int]:
        """The steps of the checkpoints, newest first; they may be incomplete in a folder."""
        return [step for path in checkpoints(self._folder) if (step := step_of(path)) is not None]

    def manifest(self, step: int) -> bytes:
        """Raises CheckpointNotFound."""
        path = checkpoint_path(self._folder, step)
        try:
            return files.read_file(path / MANIFEST)
        except FileNotFoundError:
            raise CheckpointNotFound(f"there is no complete checkpoint {path}") from None

    def size(self, step: int) -> int:
        """The bytes that a checkpoint takes."""
        folder = checkpoint_path(self._folder, step)
        return sum(os.lstat(folder / name).st_blocks * 512 for name in files.regular_files(folder))

    def reading(self, step: int) -> AbstractContextManager[object]:
        """Keeps a live run from deleting the checkpoint in the meantime."""
        return reading(checkpoint_path(self._folder, step), "copy")

    def files_of(self, manifest: Manifest) -> dict[str, Other]:
        """The files of a checkpoint, with those that its manifest does not list, such as what a callback has added."""
        folder = checkpoint_path(self._folder, manifest.step)
        names = files.regular_files(folder)
        return {name: _other(folder / name) for name in names if files.regular_file_size(folder / name) is not None}

    def blocks(self, manifest: Manifest, name: str, size: int) -> Iterator[Any]:
        """A file of a checkpoint, from its first byte to its last."""
        return file_blocks(checkpoint_path(self._folder, manifest.step) / name)

    def owning(self) -> AbstractContextManager[object]:
        """Keeps other runs away. Raises CheckpointBusy where one is alive."""
        if held_by_another(self._folder):
            raise CheckpointBusy(f"{self._folder}: a live run owns this folder; name another one, or stop the run")
        return nullcontext()

    def prepare(self, manifest: Manifest) -> Callable[[FileEntry], bool]:
        """Begins to make a checkpoint; returns what tells whether a file of it is there, whole, from an earlier try."""
        final = checkpoint_path(self._folder, manifest.step)  # made complete there, if that is what it lacks files of
        again = save_of(final) == manifest.save
        self._making = final if again else temporary_path(self._folder, manifest.step, manifest.save)
        files.make_own_folder(self._making)

        def holds(entry: FileEntry) -> bool:
            path = self._making / entry.name
            try:
                return files.regular_file_size(path) == entry.size and all(
                    True for _ in checked(file_blocks(path), manifest, entry, str(path))
                )
            except CheckpointDamaged:
                return False

        return holds

    def write(self, manifest: Manifest, name: str, blocks: Iterable[Any]) -> None:
        """Makes a file of a checkpoint that is not complete yet."""
        path = self._making / name
        files.make_folder(path.parent)
        files.remove_file(path)  # of an earlier try
        files.write_file(path, blocks)

    def commit(self, manifest: Manifest, data: bytes) -> None:
        """Makes a checkpoint complete, whose files are written. `data` are the bytes of its manifest."""
        if step_of(self._making) is None:
            self.write(manifest, MANIFEST, [data])
            publish(self._making, manifest.save)

    def set_aside(self, step: int, why: str) -> Path:
        """Lets a checkpoint be used no more: DAMAGED, or LEFT."""
        if why == LEFT and best_step(self._folder) == step:
            files.remove_file(self._folder / BEST)
        return quarantine(checkpoint_path(self._folder, step), why)

    def others(self) -> dict[str, Other]:
        """The files beside the checkpoints, by name; not those that ranks coordinate through, nor another run's."""
        names: list[str] = []
        for path in sorted(self._folder.iterdir()) if self._folder.is_dir() else ():
            if not path.name.startswith(".") and not path.is_symlink() and not _is_checkpoint(path.name):
                inside = [*files.regular_files(path, f"{path.name}/")] if path.is_dir() else [path.name]
                names += [] if any(map(_is_of_run, inside)) else inside
        found = {BEST: _other(self._folder / BEST)} if best_step(self._folder) is not None else {}
        for name in names:
            with suppress(FileNotFoundError):  # it was removed in the meantime
                if files.regular_file_size(self._folder / name) is not None:
                    found[name] = _other(self._folder / name)
        return found

    def read(self, name: str) -> bytes:
        return files.read_file(self._folder / name)

    def read_other(self, name: str, size: int) -> Iterator[Any]:
        if name == BEST:
            return iter([f"checkpoint-{best_step(self._folder)}".encode()])
        return file_blocks(self._folder / name)

    def write_other(self, name: str, blocks: Iterable[Any]) -> None:
        if name != BEST:
            files.make_folder((self._folder / name).parent)
            files.replace_file(self._folder / name, blocks, durable=True)
        elif (step := step_of(Path(b"".join(map(bytes, blocks)).decode()))) is not None:
            point_best(self._folder, step)


class BucketPlace:
    """A run in a bucket, with the methods of a `FolderPlace`; those of its checkpoints are complete."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._claim: BucketClaim | None = None
        self.address = bucket.url

    @contextmanager
    def owning(self) -> Iterator[BucketClaim]:
        self._claim = claim = BucketClaim.take(self._bucket)
        try:
            yield claim
        finally:
            claim.release()

    def steps(self) -> list[int]:
        found = [step_of(Path(name)) for name in self._bucket.inside()[0]]
        steps = sorted((step for step in found if step is not None), reverse=True)
        return [step for step in steps if self._bucket.stat(_manifest_of(step)) is not None]

    def manifest(self, step: int) -> bytes:
        try:
            return self._bucket.read(_manifest_of(step))
        except FileNotFoundError:
            self._bucket.objects(f"checkpoint-{step}")  # it fails where there is no such bucket
            raise CheckpointNotFound(f"there is no complete checkpoint {self.address}/checkpoint-{step}") from None

    def size(self, step: int) -> int:
        return sum(each.size for each in self._bucket.objects(f"checkpoint-{step}"))

    def reading(self, step: int) -> AbstractContextManager[object]:
        return nullcontext()

    def folder_with(self, manifest: Manifest) -> str:
        """Where the files are: beside the manifest, if another tool has copied a folder as it was."""
        folder = _folder_of(manifest)
        there = any(self._bucket.stat(f"{folder}/{each.name}") for each in manifest.files)
        return folder if there else f"checkpoint-{manifest.step}"

    def files_of(self, manifest: Manifest) -> dict[str, Other]:
        found, prefix = self._bucket.objects(folder := self.folder_with(manifest)), f"{folder}/"
        return {each.name.removeprefix(prefix): Other(each.size, each.time) for each in found}

    def blocks(self, manifest: Manifest, name: str, size: int) -> Iterator[Any]:
        return self._bucket.blocks(f"{self.folder_with(manifest)}/{name}", size)

    def prepare(self, manifest: Manifest) -> Callable[[FileEntry], bool]:
        folder = _folder_of(manifest)
        there = {each.name: each.size for each in self._bucket.objects(folder)}
        return lambda entry: there.get(f"{folder}/{entry.name}") == entry.size

    def write(self, manifest: Manifest, name: str, blocks: Iterable[Any]) -> None:
        self._bucket.put(f"{_folder_of(manifest)}/{name}", blocks)

    def commit(self, manifest: Manifest, data: bytes) -> None:
        """The owner's: it replaces another checkpoint of the step."""
        name = _manifest_of(manifest.step)
        assert self._claim is not None
        self._claim.renew()
        try:
            self._bucket.replace(name, data, self._bucket.read_tagged(name)[1])
        except FileNotFoundError:
            self._bucket.create(name, data)

    def set_aside(self, step: int, why: str) -> None:
        name = _manifest_of(step)
        data = self._bucket.read(name)
        try:
            save = parse_manifest(data, self.size(step)).save
        except CheckpointError:
            save = "manifest"
        self._bucket.put(f"checkpoint-{step}/{why}-{save}.json", data)
        self._bucket.delete([name])

    def remove(self, step: int) -> None:
        """Deletes a checkpoint, its manifest first. Objects that are not its own stay."""
        _, manifest = manifest_of(self, step)
        folder, own = self.folder_with(manifest), _folder_of(manifest)
        names = [f"{folder}/{each.name}" for each in manifest.files]
        self._bucket.delete([_manifest_of(step)])
        self._bucket.delete(names if folder != own else [each.name for each in self._bucket.objects(own)])

    def tidy(self, only: int | None = None, run: str = "-") -> None:
        """Deletes what saves have left that were not completed, were replaced, or were not deleted to the end, of all
        steps or one: objects with the name of a save that no manifest has, complete or set aside. Not those of a `run`,
        by the name of its claim: one of its saves may be under way."""
        for name in self._bucket.inside()[0] if only is None else [f"checkpoint-{only}"]:
            if (step := step_of(Path(name))) is None:
                continue
            found = [(each.name, _OF_SAVE.match(each.name)) for each in self._bucket.objects(name)]
            used = {match[1] for _, match in found if match and match[2] == ".json"}
            try:
                used.add(manifest_of(self, step)[1].save)
            except CheckpointNotFound:
                pass
            except CheckpointError as error:
                logger.warning("%s; it is left as it is", error)
                continue
            left = [each for each, match in found if match and match[1] not in used and not match[1].startswith(run)]
            self._bucket.delete(left)

    def others(self) -> dict[str, Other]:
        folders, found = self._bucket.inside()
        for name in folders:
            if not name.startswith(".") and not _is_checkpoint(name):
                inside = self._bucket.objects(name)
                found += [] if any(_is_of_run(each.name) for each in inside) else inside
        return {each.name: Other(each.size, each.time) for each in found}

    def best(self) -> int | None:
        """The step of the best checkpoint, which a watcher of the bucket may have chosen."""
        with suppress(FileNotFoundError):
            return step_of(Path(self._bucket.read(BEST).decode(errors="replace")))
        return None

    def note(self, others: Iterable[str]) -> None:
        """Keeps which of the objects beside checkpoints are this run's."""
        self._bucket.put(_BESIDE, json.dumps(sorted(others)).encode())

    def own_others(self) -> dict[str, Other]:
        """The objects beside checkpoints that the run has uploaded; all of them where a copy has."""
        others = self.others()
        try:
            noted = parse_json(self._bucket.read(_BESIDE))
        except (FileNotFoundError, ValueError):
            return others
        return {name: each for name, each in others.items() if name in noted}

    def read(self, name: str) -> bytes:
        return self._bucket.read(name)

    def read_other(self, name: str, size: int) -> Iterator[Any]:
        return self._bucket.blocks(name, size)

    def write_other(self, name: str, blocks: Iterable[Any]) -> None:
        self._bucket.put(name, blocks)


Place = FolderPlace | BucketPlace


def _manifest_of(step: int) -> str:
    return f"checkpoint-{step}/{MANIFEST}"


def _folder_of(manifest: Manifest) -> str:
    return f"checkpoint-{manifest.step}/{manifest.save}"


def _is_checkpoint(name: str) -> bool:
    return step_of(Path(name)) is not None or name.startswith((f"{DAMAGED}-checkpoint-", f"{LEFT}-checkpoint-"))


def _is_of_run(name: str) -> bool:
    """Whether a name inside a folder is of a run that is there."""
    return any(part == COORDINATION or _is_checkpoint(part) for part in name.split("/"))


def _other(path: Path) -> Other:
    status = os.lstat(path)
    return Other(status.st_size, status.st_mtime)


def file_blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while block := file.read(PART):
            yield block


def place_of(address: str) -> tuple[Place, int | None]:
    """The run's place at a path or an address, and the step, if it is a checkpoint's. Raises UsageError."""
    head, _, last = address.rstrip("/").rpartition("/")
    step = step_of(Path(last))
    if is_address(address):
        return BucketPlace(Bucket(address if step is None else head)), step
    path = Path(address)
    if path.is_file():
        raise UsageError(f"{address}: is a file; name a run's folder, or a checkpoint in it")
    if step is None and (path / MANIFEST).exists():
        raise UsageError(f"{address}: a checkpoint is copied under its own name; call the folder checkpoint-N")
    return FolderPlace(path if step is None else path.parent), step


@contextmanager
def explained(address: str) -> Iterator[None]:
    """Inside the block, an OSError is a CheckpointError that names the object, or else the address."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename or address}: {error.strerror or error}") from error


def verify_there(address: str) -> Iterator[VerifyReport]:
    """Reads every byte of the checkpoint at an address, or of those of the run there. Raises CheckpointNotFound where
    there is none, CheckpointError where it cannot be read."""
    place, step = place_of(address)
    with explained(address):
        steps = [step] if step is not None else place.steps()
        if not steps:
            raise CheckpointNotFound(f"{address}: there are no checkpoints")
        for each in reversed(steps):
            where = f"{place.address}/checkpoint-{each}"
            try:
                _, manifest = manifest_of(place, each)
            except CheckpointDamaged as error:
                yield VerifyReport(where, None, 0, (Corruption(MANIFEST, str(error)),))
                continue
            faults = []
            for entry in manifest.files:
                try:
                    deque(checked(place.blocks(manifest, entry.name, entry.size), manifest, entry, where), maxlen=0)
                except CheckpointDamaged as error:
                    faults.append(Corruption(entry.name, str(error)))
                except FileNotFoundError:
                    faults.append(Corruption(entry.name, "is missing"))
            yield VerifyReport(where, each, sum(entry.size for entry in manifest.files), tuple(faults))


class Copied(NamedTuple):
    """A checkpoint, or with `step` None what is beside them: its `files`, and how many bytes of them were sent."""

    step: int | None
    files: int
    sent: int


def copy(
    source: Place,
    destination: Place,
    step: int | None = None,
    *,
    begin: Callable[[int], object] = lambda total: None,
    advance: Callable[[int], object] = lambda count: None,
) -> Iterator[Copied]:
    """Copies a run, its newest checkpoint first, or the checkpoint of one step; each is complete before it appears
    there, and is yielded then. What is there is not sent again. Every checksum of a checkpoint is verified on the way.

    Args:
        source: Where it is.
        destination: The run's place there.
        step: The step; None (default) for all of the run.
        begin: Called with the bytes of what comes next.
        advance: Called with bytes that have arrived.

    Raises:
        UsageError: Both are the same place.
        CheckpointNotFound: There is nothing to copy.
        CheckpointDamaged: A checkpoint is corrupted; it is not copied.
        CheckpointError: The destination has another checkpoint of that step, or cannot be written to.
    """
    if os.path.realpath(source.address) == os.path.realpath(destination.address):  # two of one bucket differ as well
        raise UsageError(f"{destination.address}: is where the run is; name another destination")
    with explained(destination.address):
        steps = source.steps() if step is None else [step]
        others = source.others() if step is None else {}
        if not steps and not others:
            raise CheckpointNotFound(f"{source.address}: there is no run")
        check_same_run(source, destination, steps)
        with destination.owning():
            for each in steps:
                with source.reading(each):
                    try:
                        yield copy_checkpoint(source, destination, each, begin, advance)
                    except (CheckpointNotFound, FileNotFoundError):
                        if step is not None or each in source.steps():  # else the run has deleted it since
                            raise
            if others:
                yield copy_others(source, destination, others, begin, advance)


def manifest_of(place: Place, step: int) -> tuple[bytes, Manifest]:
    """The manifest of a checkpoint, as bytes too. Raises CheckpointError."""
    data = place.manifest(step)
    try:
        return data, parse_manifest(data, place.size(step) if len(data) > USUAL else 0)
    except CheckpointError as error:
        raise type(error)(f"{place.address}/checkpoint-{step}/{MANIFEST}: {error}") from error


def check_same_run(source: Place, destination: Place, steps: list[int], replaced: list[int] | None = None) -> None:
    """Raises CheckpointError where the destination has checkpoints of another run, or another one of the same step,
    unless its are `replaced`. Two places with a checkpoint in common, or the same first event, have the same run."""
    replaces, same = replaced is not None, False
    there = destination.steps() if replaced is None else replaced
    for step in sorted({*there} & {*steps}, reverse=True):  # before anything is copied
        with suppress(CheckpointNotFound, FileNotFoundError):
            same = source.manifest(step) == destination.manifest(step)
            if not (same or replaces):
                raise CheckpointError(ANOTHER.format(destination.address, step))
        if same and replaces:
            return
    if not there or not steps or same:
        return
    own, other = map(_first_event, (source, destination))
    if not (own and other):
        own, other = _identity(source, steps), _identity(destination, there)
    if own and other and own != other:
        both = f"{destination.address} has checkpoints of another run than {source.address}"
        raise CheckpointError(f"{both}; move those of one away, or name another destination")


def _identity(place: Place, steps: list[int]) -> Any:
    """The run's identity, by its newest checkpoint that can be read."""
    for step in steps:
        with suppress(CheckpointError, FileNotFoundError):
            return manifest_of(place, step)[1].identity
    return None


def _first_event(place: Place) -> Any:
    """The first line of a run's events: its time is no other run's. Empty where there are none."""
    with suppress(FileNotFoundError):
        return place.read("events.jsonl").partition(b"\n")[0]
    return b""


def copy_checkpoint(
    source: Place,
    destination: Place,
    step: int,
    begin: Callable[[int], object] = lambda total: None,
    advance: Callable[[int], object] = lambda count: None,
    *,
    stop: Event | None = None,
    replaces: bool = False,
    given: tuple[bytes, Manifest] | None = None,
) -> Copied:
    """One checkpoint of `copy`. `stop` ends it with InterruptedError; `replaces`: another checkpoint of that step.
    `given`: its manifest, which the source may not have."""
    (data, manifest), where = given or manifest_of(source, step), f"{source.address}/checkpoint-{step}"
    if manifest.step != step or not _SAVE.match(manifest.save):
        raise CheckpointDamaged(f"{where}/{MANIFEST} is of step {manifest.step} and save {manifest.save}; verify it")
    sizes, found = {entry.name: entry.size for entry in manifest.files}, source.files_of(manifest)
    unlisted = {name: each for name, each in found.items() if name not in {MANIFEST, *sizes} and is_file_name(name)}
    count, there = len(manifest.files) + len(unlisted) + 1, None
    with suppress(CheckpointNotFound):
        there = destination.manifest(step)
    if there == data:  # files may be missing nevertheless
        sizes |= {name: each.size for name, each in unlisted.items()}
        if sizes.items() <= {name: each.size for name, each in destination.files_of(manifest).items()}.items():
            return Copied(step, count, 0)
    elif there is not None and not replaces:
        raise CheckpointError(ANOTHER.format(destination.address, step))
    holds = destination.prepare(manifest)
    missing = {entry.name: entry for entry in manifest.files if not holds(entry)}
    lengths = {name: each.size for some in (unlisted, missing) for name, each in some.items()}
    total = sum(lengths.values())
    begin(total)
    streams = {name: source.blocks(manifest, name, size) for name, size in lengths.items()}
    for name, entry in missing.items():
        streams[name] = checked(streams[name], manifest, entry, f"{where}/{name}")
    write_all(destination, manifest, streams, advance, stop)
    destination.commit(manifest, data)
    return Copied(step, count, total + len(data))


def write_all(
    destination: Place,
    manifest: Manifest,
    streams: Mapping[str, Iterator[Any]],
    advance: Callable[[int], object] = lambda count: None,
    stop: Event | None = None,
) -> None:
    """Makes files of a checkpoint, some at a time; parameters as `copy_checkpoint`."""
    stops = (Event(), *([] if stop is None else [stop]))

    def send(name: str, blocks: Iterator[Any]) -> None:
        destination.write(manifest, name, counted(blocks, advance, stops))

    with ThreadPoolExecutor(FILES, thread_name_prefix="stepmark-copy") as pool:
        sent = [pool.submit(send, *each) for each in streams.items()]
        try:
            for future in sent:
                future.result()
        finally:
            stops[0].set()  # an interrupt waits for no file's end


def upload(address: str, folder: Path, manifest: Manifest, entries: Sequence[FileEntry]) -> None:
    """Uploads files of a checkpoint that is not complete yet, verified on the way."""
    streams = {
        each.name: checked(file_blocks(path := folder / each.name), manifest, each, str(path)) for each in entries
    }
    write_all(BucketPlace(Bucket(address)), manifest, streams)


def missing_others(others: dict[str, Other], there: dict[str, Other]) -> dict[str, Other]:
    """Those of `others` that a destination lacks, or has as they were before."""
    return {
        name: each
        for name, each in others.items()
        if (known := there.get(name)) is None or known.time <= each.time or known.size != each.size
    }


def copy_others(
    source: Place,
    destination: Place,
    others: dict[str, Other],
    begin: Callable[[int], object] = lambda total: None,
    advance: Callable[[int], object] = lambda count: None,
    *,
    unless_there: bool = True,
) -> Copied:
    """What is beside the checkpoints, of `copy`; without `unless_there`, also what the destination has."""
    named = {name: each for name, each in others.items() if is_file_name(name)}
    newer = missing_others(named, destination.others()) if unless_there else named
    total = sum(each.size for each in newer.values())
    begin(total)
    for name, each in newer.items():
        destination.write_other(name, counted(source.read_other(name, each.size), advance))
    return Copied(None, len(named), total)


def counted(
    blocks: Iterator[Any], advance: Callable[[int], object] = lambda count: None, stops: Sequence[Event] = ()
) -> Iterator[Any]:
    """The blocks, with their bytes told to `advance`. Raises InterruptedError once one of `stops` is set."""
    for block in blocks:
        if any(stop.is_set() for stop in stops):
            raise InterruptedError(errno.EINTR, "copying was stopped")
        yield block
        advance(len(block))
