"""What becomes of saves, for events.jsonl: begun, on disk, failed; and whether the weights moved since the last."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import xxhash

from stepmark.checkpoint import SaveHandle
from stepmark.checkpoint.format.directory import checkpoint_path
from stepmark.checkpoint.format.integrity import read_header
from stepmark.checkpoint.format.manifest import read_manifest
from stepmark.errors import CheckpointError
from stepmark.trainer.telemetry.anomalies import AnomalyDetector
from stepmark.trainer.telemetry.run_log import RunLog

MODEL = "model"  # the group of tensors, and the section, that holds the weights


@dataclass(frozen=True)
class _Begun:
    handle: SaveHandle
    stall: float
    moved: int


class SaveHistory:
    """Follows the saves of a run, on the rank that writes its journal. `poll` is cheap, and called at every step."""

    def __init__(self, journal: RunLog, folder: Path, trouble: AnomalyDetector) -> None:
        self._journal = journal
        self._folder = folder
        self._trouble = trouble
        self._under_way: list[_Begun] = []
        self._reading: threading.Thread | None = None

    def begun(self, handle: SaveHandle, stall: float) -> None:
        """A save has been begun; training has waited `stall` seconds for it."""
        self._trouble.marked(handle.step)
        self._under_way.append(_Begun(handle, stall, self._trouble.moved()))
        self._journal.event("save_begun", handle.step, stall_seconds=stall)
        self.poll()

    def restored(self, checkpoint: Path, step: int) -> None:
        """The run goes on from this checkpoint."""
        self._trouble.marked(step)
        self._trouble.saved(step)
        self._look_at_weights(checkpoint, step, moved=0)

    def poll(self) -> None:
        """Tells of the saves that have ended since the last call."""
        for save in [save for save in self._under_way if save.handle.done()]:
            self._under_way.remove(save)
            step = save.handle.step
            path = checkpoint_path(self._folder, step)
            if save.handle.failed():  # why, the error that ends the run will say
                self._journal.event("save_failed", step, stall_seconds=save.stall)
                continue
            self._journal.event(
                "saved",
                step,
                stall_seconds=save.stall,
                durable_seconds=save.handle.seconds,
                bytes=save.handle.size,
            )
            self._trouble.saved(step)
            self._look_at_weights(path, step, save.moved)

    def close(self) -> None:
        """Returns when all that was begun is told."""
        self.poll()
        if self._reading is not None:
            self._reading.join()

    def _look_at_weights(self, path: Path, step: int, moved: int) -> None:
        """Compares digests in a thread of its own: the headers of a large model take a moment to read."""
        before = self._reading

        def look() -> None:
            if before is not None:
                before.join()
            found = weights_fingerprint(path)
            if found is not None:
                self._trouble.weights(step, found, moved)

        self._reading = threading.Thread(target=look, name="stepmark-weights", daemon=True)
        self._reading.start()


def weights_fingerprint(checkpoint: Path) -> str | None:
    """A digest of the digests of all model tensors, and of how they are cut; None where the checkpoint is damaged, or
    not there any more."""
    hashed = xxhash.xxh3_128()
    try:
        manifest = read_manifest(checkpoint)
        wanted = set(manifest.tensors.get(MODEL, {}))
        for entry in manifest.files:
            if entry.header is None or "/" in entry.name:
                continue
            header = read_header(checkpoint, manifest, entry)
            for tensor in header.tensors:
                if tensor.name in wanted:
                    hashed.update(repr((tensor.name, tensor.piece, header.digests[tensor.name])).encode())
    except (CheckpointError, OSError):  # that is for the restore to tell
        return None
    return hashed.hexdigest() if wanted else None
