"""A run in a bucket, as a watcher follows it: by way of a folder of this machine that stands for the run's own.

Of a checkpoint there is the manifest, and the rest while it is evaluated, so that one at a time is on this machine.
What the watcher writes is sent to the bucket. Watchers divide the checkpoints by claims there.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from stepmark.checkpoint.coordination.bucket_claim import OWNER, BucketClaim, is_owned
from stepmark.checkpoint.format.checkpoint_folders import COORDINATION, STOP_REQUEST, checkpoints, step_of
from stepmark.checkpoint.format.manifest import MANIFEST, is_file_name, read_manifest
from stepmark.checkpoint.places import BucketPlace, FolderPlace, Other, explained, manifest_of
from stepmark.checkpoint.save.delete_old_checkpoints import note_deleted
from stepmark.errors import CheckpointBusy, CheckpointError, CheckpointNotFound
from stepmark.filesystem import files
from stepmark.filesystem.cache_folder import with_addresses
from stepmark.filesystem.local_paths import is_address
from stepmark.filesystem.objects import Bucket
from stepmark.liveness.failure_report import describe_error
from stepmark.liveness.running_time import Silence
from stepmark.recipe.used_recipe import USED_RECIPE
from stepmark.trainer.run_folder.status import STATUS
from stepmark.watcher.evaluation_data import MODEL_CONFIGS
from stepmark.watcher.evaluation_records import EVALUATIONS, write_table

_READ = {STATUS, USED_RECIPE, *MODEL_CONFIGS}  # what a watcher reads beside the checkpoints

logger = logging.getLogger("stepmark")


class FollowedRun:
    """Keeps the folder in step with the run in the bucket. `owned`: whether a live run had it, at the last look."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._bucket = folder, Bucket(with_addresses(str(folder)))
        self._there, self._here = BucketPlace(self._bucket), FolderPlace(folder)
        self._sent: dict[str, Other] = {}
        self._whole: Path | None = None
        self._claim: tuple[Bucket, BucketClaim] | None = None
        self._silences: defaultdict[str, Silence] = defaultdict(Silence)  # of owners, by address
        self._problem = ""
        self.owned = False

    def begin(self) -> Path:
        """The folder, which is there once the run is. Raises CheckpointError where the bucket is not to be used."""
        if step_of(self._folder) is None:  # a checkpoint is refused, wherever it is
            with explained(self._bucket.url):
                self._bucket.check()
                self._follow()
        return self._folder

    def look(self) -> bool:
        """Looks at what is new there, and sends what is new here. Returns whether the bucket has answered."""

        def follow() -> None:
            self.owned = is_owned(self._bucket, self._silences[self._bucket.url])  # first: its last upload is before
            self._follow()
            self._send()
            self._problem = ""

        return self._answers(follow)

    def _answers(self, work: Callable[[], object]) -> bool:
        try:
            work()
        except OSError as error:
            if not is_address(error.filename):
                raise
            if (said := describe_error(error)) != self._problem:
                logger.warning("%s; it is tried again", said)
            self._problem = said
            return False
        return True

    def _follow(self) -> None:
        folders, beside = self._bucket.inside()
        for name in _READ.intersection(each.name for each in beside):
            files.make_folder(self._folder)
            files.replace_file(self._folder / name, self._bucket.read(name))
        there = sorted((step, self._folder / name) for name in folders if (step := step_of(Path(name))) is not None)
        for path in set(checkpoints(self._folder)).difference(path for _, path in there):
            with suppress(CheckpointError):
                files.make_own_folder(self._folder / COORDINATION)
                note_deleted(self._folder, step_of(path) or 0, read_manifest(path).save)
            files.remove_tree(path)
        same = False  # as before; then those before it are too, since a run that goes back leaves all later ones
        for step, path in reversed(there):
            if not (same and path.exists()):
                try:
                    data = self._there.manifest(step)
                except CheckpointNotFound:
                    files.remove_tree(path)
                    continue
                same = path.exists() and files.read_file(path / MANIFEST) == data
                if not same:
                    self._leave_manifest(path, data)

    def _leave_manifest(self, path: Path, data: bytes) -> None:
        """The manifest, and nothing else, is there of the checkpoint afterwards."""
        self._whole = None if path == self._whole else self._whole
        files.remove_tree(path)
        files.make_folder(path)
        files.write_file(path / MANIFEST, data, durable=False)

    def _send(self) -> None:
        self._merge()  # first, so that the table has all lines
        for name, each in self._here.others().items():
            if name not in _READ | {EVALUATIONS} and self._sent.get(name) != each:
                self._there.write_other(name, self._here.read_other(name, each.size))
                self._sent[name] = each
        if (request := self._folder / STOP_REQUEST).exists():
            self._bucket.put(STOP_REQUEST, files.read_file(request))
            files.remove_file(request)

    def _merge(self) -> None:
        """Adds the lines of evaluations.jsonl that either place lacks."""
        path = self._folder / EVALUATIONS
        while True:
            own, data, tag = files.read_file(path) if path.exists() else b"", b"", ""
            with suppress(FileNotFoundError):
                data, tag = self._bucket.read_tagged(EVALUATIONS)
            known = set(data.splitlines())
            if new := [line for line in own.splitlines() if line not in known]:
                data = b"\n".join([*data.splitlines(), *new, b""])
                with suppress(FileExistsError, FileNotFoundError):  # another watcher was faster
                    self._bucket.replace(EVALUATIONS, data, tag) if tag else self._bucket.create(EVALUATIONS, data)
                continue
            if data != own:
                files.replace_file(path, data)
                if own:
                    write_table(self._folder)
            return

    def claim(self, path: Path, setup: str) -> bool:
        """Claims a checkpoint in the bucket until `release`, and looks at what is recorded. Returns False where another
        watcher has it, or the bucket does not answer."""
        place = Bucket(f"{self._bucket.url}/{COORDINATION}/evaluating/{setup}/{path.name}")

        def take() -> None:
            if not is_owned(place, self._silences[place.url]):
                self._claim = place, BucketClaim.take(place)
                self._merge()

        try:
            return self._answers(take) and self._claim is not None
        except CheckpointBusy:
            return False

    def release(self) -> None:
        """Sends what was recorded, and then lets others claim the checkpoint."""
        self._answers(self._send)
        if self._claim is not None:
            (place, claim), self._claim = self._claim, None
            claim.release()
            self._answers(lambda: place.delete([OWNER]))

    def fetch(self, path: Path) -> bool:
        """Downloads a checkpoint as it is: its evaluation verifies it. Returns False where it has to be tried again."""
        return self._answers(lambda: self._download(path)) and (self._whole == path or not path.exists())

    def _download(self, path: Path) -> None:
        if path == self._whole:
            return
        if self._whole is not None and self._whole.exists():
            self._leave_manifest(self._whole, files.read_file(self._whole / MANIFEST))
        step = step_of(path) or 0
        try:
            data, manifest = manifest_of(self._there, step)
            folder = self._there.folder_with(manifest)
            with suppress(FileNotFoundError):  # the run deletes it
                for each in self._bucket.objects(folder):
                    name = each.name.removeprefix(f"{folder}/")
                    if is_file_name(name) and name != MANIFEST:
                        files.make_folder((path / name).parent)
                        files.replace_file(path / name, self._bucket.blocks(each.name, each.size))
            if data == self._there.manifest(step) == files.read_file(path / MANIFEST):
                self._whole = path
        except CheckpointNotFound:
            files.remove_tree(path)
        except CheckpointError:  # in its manifest, which is here
            self._whole = path
