"""The checkpoints of a run, deleted ones included: their state, size and timing."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepmark.checkpoint.format.checkpoint_folders import best_step, step_of
from stepmark.checkpoint.format.integrity import check_integrity
from stepmark.checkpoint.format.manifest import Manifest, read_manifest
from stepmark.errors import CheckpointError
from stepmark.report.history import History
from stepmark.trainer.run_folder.status import RUNNING, STUCK

SAVES = ("saved", "save_begun", "save_failed")  # events
SMALL = 1 << 20  # bytes of a file whose checksum is read
_QUARANTINED = re.compile(r"damaged-checkpoint-(\d+)(\.\d+)?\Z")
_UNFINISHED = re.compile(r"\.checkpoint-(\d+)\..+\Z")


@dataclass(frozen=True)
class Checkpoint:
    """One save. `state` is complete, corrupted, quarantined, deleted, unfinished or failed; `detail` explains it.
    `size` is in bytes, `stall` and `durable` in seconds, `time` in seconds since 1970; None if unknown."""

    step: int
    name: str
    state: str
    detail: str
    size: int | None = None
    stall: float | None = None
    durable: float | None = None
    time: float | None = None
    restored: int = 0  # how many times a run resumed from it, with every checksum verified


def read_checkpoints(history: History) -> list[Checkpoint]:
    """In order of steps. Sizes, headers and small files of existing checkpoints are checked; tensors are not read."""
    events = _last_events(history)
    found: dict[str, Checkpoint] = {}
    for path in sorted(history.folder.iterdir()):
        if (one := _of_folder(path, events, history)) is not None:
            found[one.name] = one
    there = {one.step for one in found.values() if one.state in ("complete", "corrupted")}
    for step in {step for kind in SAVES for step in events[kind]} - there:
        one = _of_events(step, events)
        found.setdefault(one.name, one)
    restored = Counter(str(event.get("checkpoint")) for event in history.of_kind("resumed"))
    whole = [one for one in found.values() if one.state in ("complete", "corrupted", "deleted")]
    found |= {one.name: replace(one, restored=restored[one.name]) for one in whole}
    return sorted(found.values(), key=lambda one: (one.step, one.time or 0.0, one.name))


def _last_events(history: History) -> dict[str, dict[int, dict[str, Any]]]:
    """The last event of each kind for each step; of saves, only if the checkpoint was not quarantined since."""
    found: dict[str, dict[int, dict[str, Any]]] = {kind: {} for kind in (*SAVES, "set_aside")}
    for event in history.of_kind(*found):
        if (step := event.get("step")) is not None:
            found[event["event"]][step] = event
            for kind in SAVES if event["event"] == "set_aside" else ():
                found[kind].pop(step, None)
    return found


def _of_folder(path: Path, events: dict[str, dict[int, dict[str, Any]]], history: History) -> Checkpoint | None:
    if not path.is_dir():
        return None
    step = step_of(path)
    if step is not None:
        return _existing(path, step, events["saved"].get(step) or events["save_begun"].get(step, {}), history)
    if quarantined := _QUARANTINED.match(path.name):
        step = int(quarantined[1])
        event = events["set_aside"].get(step, {})
        detail = str(event.get("reason") or inspected(path)[0] or "quarantined when the run was resumed")
        return Checkpoint(step, path.name, "quarantined", detail, _size(path), time=event.get("time"))
    if unfinished := _UNFINISHED.match(path.name):
        writing = "being written, or " if history.state in (RUNNING, STUCK) else ""
        return Checkpoint(int(unfinished[1]), path.name, "unfinished", f"{writing}left by a killed save", _size(path))
    return None


def _existing(path: Path, step: int, saved: dict[str, Any], history: History) -> Checkpoint | None:
    problem, manifest = inspected(path)
    if problem is not None and not path.is_dir():  # retention has just deleted it
        return None
    notes = [] if problem is None else [problem]
    if manifest is not None and manifest.model_only:
        notes.append("model only")
    if best_step(history.folder) == step:
        notes.append("kept as the best")
    time = saved.get("time") if manifest is None else manifest.time
    state = "complete" if problem is None else "corrupted"
    seconds = saved.get("stall_seconds"), saved.get("durable_seconds")
    return Checkpoint(step, path.name, state, "; ".join(notes), _size(path), *seconds, time)


def _of_events(step: int, events: dict[str, dict[int, dict[str, Any]]]) -> Checkpoint:
    name = f"checkpoint-{step}"
    saved, begun, failed = (events[kind].get(step) for kind in SAVES)
    if saved is not None:
        seconds = saved.get("stall_seconds"), saved.get("durable_seconds")
        return Checkpoint(step, name, "deleted", "retention", saved.get("bytes"), *seconds, saved.get("time"))
    last = failed or begun or {}
    state = "failed" if failed else "unfinished"
    detail = str(failed.get("reason") or "") if failed else "started, but not committed"
    return Checkpoint(step, name, state, detail, stall=last.get("stall_seconds"), time=last.get("time"))


def inspected(path: Path) -> tuple[str | None, Manifest | None]:
    """A checkpoint's corruption, found without reading its tensors (None: intact), and its manifest if readable."""
    manifest = None
    try:
        manifest = read_manifest(path)
        check_integrity(path, manifest, SMALL)
    except (CheckpointError, OSError) as error:
        return str(error).replace(f"{path}/", ""), manifest
    return None, manifest


def _size(path: Path) -> int | None:
    try:
        return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
    except OSError:  # it is being deleted
        return None
