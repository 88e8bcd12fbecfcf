"""Measures what checkpoints need of the file system that the run's folder is on, and of its place in a bucket."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from stepmark.filesystem import files
from stepmark.filesystem.locks import try_lock
from stepmark.filesystem.objects import Bucket
from stepmark.preflight.doctor.findings import Finding, Status

TOPIC = "folder"
MEASURED_BYTES = 64 << 20
SYNCS = 11
SLOW_SYNC = 0.5  # seconds; a save syncs a few times per file
SLOW_WRITE = 50e6  # bytes per second
LITTLE_ROOM = 1 << 30
COPYING = 0.2  # of the time that writing took: a rename that lasts so long copies
NOTICEABLE = 0.1  # seconds
MOUNTS = Path("/proc/self/mounts")


def look_at_folder(folder: Path) -> Iterator[Finding]:
    """Writes into a temporary folder inside the nearest existing parent of `folder`, and removes it."""
    parent = next(each for each in (folder, *folder.parents) if each.exists())
    kind = file_system(parent)
    free = shutil.disk_usage(parent).free
    status = Status.WARNING if free < LITTLE_ROOM else Status.OK
    yield Finding(TOPIC, str(folder), f"{kind}, {free / 1e9:.1f} GB free", status, {"type": kind, "free": free})
    if kind == "tmpfs":
        yield Finding(TOPIC, "durability", "tmpfs is memory: nothing survives a reboot", Status.WARNING)
    if kind.startswith("fuse."):
        text = f"{kind} may be a bucket, where a rename is a copy that can be cut off; write to a real file system"
        yield Finding(TOPIC, "atomicity", text, Status.WARNING)
    trial = parent / f".stepmark-doctor-{uuid.uuid4().hex}"
    try:
        trial.mkdir()
    except OSError as error:
        text = f"cannot write to {parent}: {error.strerror}; choose another output_dir"
        yield Finding(TOPIC, "write", text, Status.FAILURE)
        return
    try:
        yield from (look(trial) for look in (_rename, _exchange, _lock, _sync))
        yield from _throughput(trial)
    except OSError as error:
        text = f"{error.strerror} while it was tried; choose another output_dir"
        yield Finding(TOPIC, "write", text, Status.FAILURE)
    finally:
        shutil.rmtree(trial, ignore_errors=True)


def _rename(trial: Path) -> Finding:
    """Renames a folder that has a file, as a commit of a checkpoint does, and a file over another one."""
    (trial / "before").mkdir()
    files.write_file(trial / "before" / "one", b"1")
    files.rename(trial / "before", trial / "after")
    files.write_file(trial / "two", b"2")
    files.rename(trial / "two", trial / "after" / "one")
    if (trial / "before").exists() or (trial / "after" / "one").read_bytes() != b"2":
        text = "a rename did not replace what had the name; choose another file system"
        return Finding(TOPIC, "rename", text, Status.FAILURE)
    return Finding(TOPIC, "rename", "works")


def _exchange(trial: Path) -> Finding:
    for name in ("left", "right"):
        (trial / name).mkdir()
    if files.exchange(trial / "left", trial / "right"):
        return Finding(TOPIC, "exchange", "works: a checkpoint of the same step is replaced in one operation")
    return Finding(TOPIC, "exchange", "not supported: a checkpoint of the same step is moved aside first")


def _lock(trial: Path) -> Finding:
    """A lock belongs to an open file, so a second one of the same file must not get it."""
    first, second = (files.open_for_writing(trial / "lock") for _ in range(2))
    try:
        taken, again = try_lock(first), try_lock(second)
    finally:
        files.close(first)
        files.close(second)
    if taken and not again:
        return Finding(TOPIC, "locks", "work")
    text = "a locked file could be locked again: two runs could take one folder; mount it with locks"
    if taken is None:
        text = "not supported: whether a run is alive is told by its heartbeats alone, which takes up to a minute"
    return Finding(TOPIC, "locks", text, Status.WARNING)


def _sync(trial: Path) -> Finding:
    seconds = []
    for number in range(SYNCS):
        began = time.perf_counter()
        files.write_file(trial / f"small-{number}", b"x" * 4096)
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds)
    values = {"median_seconds": median, "longest_seconds": max(seconds)}
    text = f"{1000 * median:.1f} ms for a small file, {1000 * max(seconds):.1f} ms at the most"
    if median > SLOW_SYNC:
        return Finding(TOPIC, "fsync", f"{text}: saves will wait for it", Status.WARNING, values)
    return Finding(TOPIC, "fsync", text, values=values)


def _throughput(trial: Path) -> Iterator[Finding]:
    """Measures writing a large file, and whether renaming copies it."""
    data = memoryview(os.urandom(1 << 20))
    descriptor = files.open_for_writing(trial / "large")
    try:
        began = time.perf_counter()
        for offset in range(0, MEASURED_BYTES, len(data)):
            files.write_at(descriptor, data, offset)
        files.sync(descriptor)
        written = time.perf_counter() - began
    finally:
        files.close(descriptor)
    began = time.perf_counter()
    files.rename(trial / "large", trial / "renamed")
    renamed, rate = time.perf_counter() - began, MEASURED_BYTES / written
    slow = rate < SLOW_WRITE
    text = f"{rate / 1e6:.0f} MB/s for {MEASURED_BYTES >> 20} MiB with fsync, by one process"
    yield Finding(TOPIC, "throughput", text, Status.WARNING if slow else Status.OK, {"bytes_per_second": rate})
    if renamed > max(COPYING * written, NOTICEABLE):
        text = f"{renamed:.1f} s for one large file, {written:.1f} s to write it: renaming copies, and can be cut off"
        yield Finding(TOPIC, "atomicity", text, Status.WARNING)


def file_system(path: Path) -> str:
    """The type of the file system that a path is on; "unknown" where the system does not say."""
    resolved, best, kind = path.resolve(), -1, "unknown"
    with contextlib.suppress(OSError):
        for line in MOUNTS.read_text().splitlines():
            _, mount, found, *_ = line.split(" ")
            point = Path(mount.encode().decode("unicode_escape"))  # a space is \040
            if resolved.is_relative_to(point) and len(point.parts) >= best:
                best, kind = len(point.parts), found
    return kind


def look_at_place(address: str) -> Iterator[Finding]:
    """Tries what a run needs of its place in object storage, and measures it, with objects that are removed."""
    bucket, name = Bucket(address), f".stepmark/doctor-{uuid.uuid4().hex}"
    size = MEASURED_BYTES
    try:
        bucket.check()
        others = "" if address.startswith("s3://") else "; stepmark was tried with s3 only"
        yield Finding(TOPIC, address, f"objects are made, replaced under a condition, read, listed and deleted{others}")
        text = (
            "not seen by this client: whether a rule of the bucket removes unfinished uploads; docs/object-storage.md"
        )
        yield Finding(TOPIC, "lifecycle", text)
        block = os.urandom(1 << 20)
        try:
            began = time.perf_counter()
            bucket.put(name, (block for _ in range(size >> 20)))
            written = time.perf_counter()
            for _ in bucket.blocks(name, size):
                pass
            up, down = size / (written - began), size / (time.perf_counter() - written)
        finally:
            bucket.delete([name])
    except OSError as error:
        yield Finding(TOPIC, address, f"{error.strerror}: {error.filename}", Status.FAILURE)
        return
    text = f"{up / 1e6:.0f} MB/s up and {down / 1e6:.0f} MB/s down for an object of {size >> 20} MiB"
    status = Status.WARNING if min(up, down) < SLOW_WRITE else Status.OK
    yield Finding(TOPIC, "bucket", text, status, {"bytes_per_second_up": up, "bytes_per_second_down": down})
