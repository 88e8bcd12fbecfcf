"""Records saves in events.jsonl (begun, saved, failed), and whether the weights changed since the previous save."""

from __future__ import annotations

import threading
from pathlib import Path

import xxhash

from stepmark.checkpoint import SaveHandle
from stepmark.checkpoint.format.checkpoint_folders import checkpoint_path
from stepmark.checkpoint.format.integrity import read_header
from stepmark.checkpoint.format.manifest import MODEL, read_manifest
from stepmark.errors import CheckpointError
from stepmark.trainer.run_folder.run_log import RunLog
from stepmark.trainer.telemetry.anomalies import AnomalyDetector


class SaveHistory:
    """Tracks a run's saves on the rank that writes its log; elsewhere calls do nothing. `poll` is cheap."""

    def __init__(self, run_log: RunLog, folder: Path, anomalies: AnomalyDetector) -> None:
        self._run_log = run_log
        self._folder = folder
        self._anomalies = anomalies
        self._pending: list[tuple[SaveHandle, float, int]] = []  # with the stall, and the steps that moved the weights
        self._reading: threading.Thread | None = None

    def begun(self, handle: SaveHandle, stall: float) -> None:
        """A save has begun; training waited `stall` seconds for it."""
        if not self._run_log.writes:
            return
        self._anomalies.marked(handle.step)
        self._pending.append((handle, stall, self._anomalies.moved()))
        self._run_log.event("save_begun", handle.step, stall_seconds=stall)
        self.poll()

    def restored(self, checkpoint: Path, step: int) -> None:
        if not self._run_log.writes:
            return
        self._run_log.describe(newest_checkpoint=checkpoint.name)
        self._anomalies.marked(step)
        self._compare_weights(checkpoint, step, moved=0)

    def poll(self) -> None:
        """Reports the saves that have ended since the last call."""
        for save in [save for save in self._pending if save[0].done()]:
            self._pending.remove(save)
            handle, stall, moved = save
            step, path = handle.step, checkpoint_path(self._folder, handle.step)
            if handle.failed():  # the error that ends the run says why
                self._run_log.event("save_failed", step, stall_seconds=stall)
                continue
            sizes = {"durable_seconds": handle.seconds, "bytes": handle.size}
            self._run_log.event("saved", step, stall_seconds=stall, **sizes)
            self._run_log.describe_now(newest_checkpoint=path.name)
            self._compare_weights(path, step, moved)

    def close(self) -> None:
        """Returns when every save is reported."""
        self.poll()
        if self._reading is not None:
            self._reading.join()

    def _compare_weights(self, path: Path, step: int, moved: int) -> None:
        """Compares checksums in a separate thread: reading the headers of a large model takes a moment."""
        before = self._reading

        def compare() -> None:
            if before is not None:
                before.join()
            found = weights_fingerprint(path)
            if found is not None:
                self._anomalies.weights(step, found, moved)

        self._reading = threading.Thread(target=compare, name="stepmark-weights", daemon=True)
        self._reading.start()


def weights_fingerprint(checkpoint: Path) -> str | None:
    """A checksum over those of all model tensors; None where the checkpoint is corrupted or was deleted."""
    hashed = xxhash.xxh3_128()
    try:
        manifest = read_manifest(checkpoint)
        names = set(manifest.tensors.get(MODEL, {}))
        for entry in manifest.files:
            if entry.header is None or "/" in entry.name:
                continue
            header = read_header(checkpoint, manifest, entry)
            for tensor in header.tensors:
                if tensor.name in names:
                    hashed.update(repr((tensor.name, tensor.slice, header.digests[tensor.name])).encode())
    except (CheckpointError, OSError):  # restoring it will report why
        return None
    return hashed.hexdigest() if names else None
