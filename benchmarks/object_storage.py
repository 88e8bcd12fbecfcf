"""Uploads and downloads of a checkpoint beside the client's own transfer of the same files, and what they take.

    .venv/bin/python benchmarks/object_storage.py --gigabytes 1 --folder /a/disk

The store is in the memory of this process and answers at once, so what is measured is all that Stepmark adds: reading,
checksums, requests. The client (obstore) uploads the same files from their paths, and downloads them to new files, as
many at a time. Both read from the page cache, and write without a sync, nor is the page cache told to drop what was
restored, which would write it; with --sync, both sync each file, and what the disk takes is measured too. With --moto,
the same against moto's server, where the server is what is measured.

"Beside training" is the speed of a loop of matrix products on one thread that saves once a minute, divided by its speed
without: what a loop of ten seconds loses to one upload, on the other cores, as a part of a minute.

"Restore" is that of a Checkpointer at the address whose cache is empty, until the values are in the model. "Stall" is
how long its `save` takes, once the save before has ended, beside one to a folder.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest import mock

import keeping
import obstore
import torch
from obstore.store import MemoryStore

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.places import FILES, BucketPlace, FolderPlace, copy_checkpoint
from stepmark.filesystem import files
from stepmark.filesystem.objects import IN_FLIGHT, PART, Bucket

LOOP = 10.0  # seconds of the loop


def model_of(gigabytes: float) -> torch.nn.Module:
    return torch.nn.ParameterList([torch.randn(2**24) for _ in range(round(gigabytes * 2**30 / 2**26))])


def make(folder: Path, gigabytes: float) -> int:
    """Writes a checkpoint of that size in files of 256 MiB; the bytes of its tensor files."""
    model = model_of(gigabytes)
    with Checkpointer(folder, max_file_size=2**28) as checkpointer:
        path = checkpointer.save(1, {"model": model}, block=True).result()
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())


@contextlib.contextmanager
def store(kind: str) -> Iterator[Bucket]:
    if kind == "memory":
        with mock.patch("obstore.store.from_url", return_value=MemoryStore()):
            yield Bucket("s3://memory/run")
        return
    from tests.support.buckets import make_bucket, object_store

    with object_store() as proxy, mock.patch.dict(os.environ, AWS_ENDPOINT_URL=f"http://{proxy.store}"):
        yield Bucket(f"{make_bucket(proxy)}/run")


def client_up(bucket: Bucket, folder: Path) -> None:
    """To names that a restore does not take for the run's."""

    def put(name: str) -> None:
        parts = {"use_multipart": True, "chunk_size": PART, "max_concurrency": IN_FLIGHT}
        obstore.put(bucket._store, f".plain/{name}", folder / name, **parts)

    with ThreadPoolExecutor(FILES) as pool:
        list(pool.map(put, list(files.regular_files(folder))))


def client_down(bucket: Bucket, folder: Path) -> None:
    def get(name: str) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb", buffering=0) as out:
            for block in obstore.get(bucket._store, f".plain/{name}").stream(min_chunk_size=PART):
                out.write(block)
            files.sync(out.fileno())

    names = [each["path"].removeprefix(".plain/") for some in obstore.list(bucket._store, ".plain") for each in some]
    with ThreadPoolExecutor(FILES) as pool:
        list(pool.map(get, names))


def take_memory(path: Path, size: int) -> None:
    """Has the page cache hold so much, and frees it: a virtual machine gets free memory back from its host only slowly,
    whoever is the first to use it."""
    with open(path, "wb", buffering=0) as out:
        for _ in range(0, size, PART):  # more than what the turns before have freed
            out.write(bytes(PART))
    path.unlink()


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def loop(seconds: float) -> float:
    """Products a second, on one thread."""
    a, began, count = torch.randn(512, 512), time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        torch.mm(a, a)
        count += 1
    return count / (time.perf_counter() - began)


def beside(work: Callable[[], object], seconds: float) -> float:
    """The loop's speed on the first core, while the work is done once on the others."""
    cores = sorted(os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores[:1] if int(thread) == threading.get_native_id() else cores[1:])

    def run() -> None:
        os.sched_setaffinity(0, cores[1:])
        work()

    worker = threading.Thread(target=run)
    worker.start()
    found = loop(seconds)
    worker.join()
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)
    return found


def restore(bucket: Bucket, model: torch.nn.Module) -> None:
    with Checkpointer(bucket.url) as checkpointer:
        assert checkpointer.restore({"model": model}) == 1


def stall(place: str, model: torch.nn.Module) -> float:
    """The median, of five saves after the first."""
    with Checkpointer(place, keep_last=1) as checkpointer:
        found = []
        for step in range(6):
            found.append(timed(partial(checkpointer.save, step + 2, {"model": model})))
            checkpointer.wait()
    return statistics.median(found[1:])


def measure(options: argparse.Namespace, kind: str, root: Path, size: int) -> list[str]:
    """The table's lines of one kind of store."""
    run, place = root / "run", FolderPlace(root / "run")
    times: dict[str, list[float]] = {}
    with store(kind) as bucket, contextlib.ExitStack() as stack:
        if not options.sync:
            stack.enter_context(mock.patch.object(files, "sync"))
            stack.enter_context(mock.patch.object(os, "posix_fadvise"))
        there = BucketPlace(bucket)
        with there.owning():

            def upload() -> None:
                with contextlib.suppress(Exception):
                    there.remove(1)
                copy_checkpoint(place, there, 1)

            def download() -> None:
                copy_checkpoint(there, FolderPlace(root / "down"), 1)

            turns = {
                "ours up": upload,
                "client up": lambda: client_up(bucket, run / "checkpoint-1"),
                "ours down": download,
                "client down": lambda: client_down(bucket, root / "plain"),
            }
            for _ in range(options.rounds + 1):  # the first warms up
                for name, work in turns.items():
                    take_memory(root / "taken", 3 * size)
                    times.setdefault(name, []).append(timed(work))
                    for each in ("down", "plain"):
                        shutil.rmtree(root / each, ignore_errors=True)
        model = model_of(options.gigabytes)
        for _ in range(options.rounds + 1):
            take_memory(root / "taken", 3 * size)
            times.setdefault("client down again", []).append(timed(turns["client down"]))
            shutil.rmtree(root / "plain")
            take_memory(root / "taken", 3 * size)
            times.setdefault("restore", []).append(timed(lambda: restore(bucket, model)))
            shutil.rmtree(root / "cache")
        stalls = [
            stall(str(root / "beside"), model) / stall(f"{bucket.url}-beside", model) for _ in range(options.rounds)
        ]
        with there.owning():
            pairs = (
                [(beside(lambda: None, LOOP), beside(upload, LOOP)) for _ in range(options.rounds)]
                if kind == "memory"
                else []
            )
    lines = [f"## {kind}, {size / 2**30:.2f} GiB", "", "| | GB/s, median |", "| --- | --- |"]
    lines += [f"| {name} | {size / 1e9 / statistics.median(times[name][1:]):.2f} |" for name in turns]
    lines.append("")
    for way in ("up", "down"):
        ratios = [c / o for c, o in zip(times[f"client {way}"][1:], times[f"ours {way}"][1:], strict=True)]
        lines.append(f"- speed of {way}load beside the client: {statistics.median(ratios):.2f}")
    ratios = [r / c for c, r in zip(times["client down again"][1:], times["restore"][1:], strict=True)]
    lines.append(f"- time of a restore on an empty disk beside the client's download: {statistics.median(ratios):.2f}")
    lines.append(f"- stall of a save to a folder beside one to the bucket: {statistics.median(stalls):.2f}")
    if pairs:
        lost = statistics.median(LOOP * (1 - b / a) for a, b in pairs)
        lines.append(f"- a loop beside an upload a minute: {1 - lost / 60:.3f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--moto", action="store_true")
    parser.add_argument("--sync", action="store_true")
    parser.add_argument("--save", action="store_true", help="append the numbers to those in results/")
    options = parser.parse_args()
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="object-storage-", dir=options.folder))
    try:
        size = make(root / "run", options.gigabytes)
        lines = []
        os.environ["STEPMARK_CACHE"] = str(root / "cache")
        for kind in ("memory", *(["moto"] if options.moto else [])):
            lines += [*measure(options, kind, root, size), ""]
    finally:
        shutil.rmtree(root)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    head = f"# Object storage\n\n{keeping.machine()}, {options.rounds} rounds. Ratios are medians.\n"
    text = "\n".join([head, *lines])
    print(f"{text}\npeak memory of the process, with the store in it where it is in memory: {peak:,.0f} MB")
    if options.save:
        keeping.keep("object_storage", f"{options.gigabytes:g} GiB", text)


if __name__ == "__main__":
    main()
