"""Saving and restoring with Stepmark beside memcpy, raw writing and reading, and other ways to save tensors.

    .venv/bin/python benchmarks/checkpoint.py --gib 1 4 --save
    .venv/bin/python benchmarks/checkpoint.py --gib 1 --tensors 2000 --only raw "raw, direct" safetensors stepmark
    .venv/bin/python benchmarks/checkpoint.py --gib 1 --xla

The contestants run in turn, round after round. Each saves in one process and restores in another, forked from one that
has imported everything and holds the state (fp32) in memory that all of them share. Those that keep memory from save to
save are measured at their second. Before each measurement the disk is left to rest. Every contestant restores into the
same memory, whose pages have been touched: one small tensor first, which pays for what it imports and starts; then the
state, with the files' pages dropped from the page cache; then once more with all of them in it. "New memory" is what
touching the state's memory costs for the first time, which restoring into new tensors adds.

Printed are medians: seconds until training may go on and until the bytes are on the disk, to restore ("restore" from
the disk, "cached" from memory, "first" the small one), the peak of extra resident memory of saving and restoring, and
processor seconds of a save; and for Stepmark the medians of the ratios within a round, beside their bars. "Raw" is the
faster of two in each round: one thread through the page cache with fsync, and one past it. Stepmark checks digests of
every byte; of the others, only torch.save's files have any (a CRC, which torch.load does not check).
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("PJRT_DEVICE", "CPU")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
from apart import PeakMemory, apart  # noqa: E402
from checkpoint_contestants import CONTESTANTS, ON_XLA, Contestant, State  # noqa: E402
from keeping import keep, machine  # noqa: E402
from page_cache import drop_cache, read_all  # noqa: E402

COLUMNS = {"go on": "s", "durable": "s", "restore": "s", "cached": "s", "first": "s", "memory": "GiB", "cpu": "s"}
RAW = ("raw", "raw, direct")
NO_PEERS = ("memcpy", "new memory", *RAW, "stepmark")
Result = dict[str, float]


def shared_state(size: int, tensors: int) -> State:
    """`size` bytes of fp32, in whole pages for each tensor, in memory that children share, so that none of them copies
    it by writing to it."""
    each = max(size // tensors // mmap.PAGESIZE, 1) * mmap.PAGESIZE
    memory = mmap.mmap(-1, each * tensors)
    return {
        f"layers.{index}.weight": torch.frombuffer(
            memory, dtype=torch.float32, count=each // 4, offset=index * each
        ).normal_()
        for index in range(tensors)
    }


def timed(function: Callable[..., None], *arguments: Any) -> float:
    started = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - started


def rest() -> None:
    os.sync()
    time.sleep(0.3)


def on_device(state: State, options: argparse.Namespace) -> State:
    """The state where it is saved from, or restored to."""
    if options.xla:
        import torch_xla

        state = {name: tensor.to(torch_xla.device()) for name, tensor in state.items()}
        torch_xla.sync(wait=True)
    return state


def save(kind: type[Contestant], state: State, options: argparse.Namespace, base: Path) -> Result:
    """Saves, and once more into another folder what is measured at its second save."""
    state = on_device(state, options)
    for tensor in state.values():
        tensor.sum().item()  # touches every page
    peak, result = PeakMemory(), {}
    peak.begin()
    contestant = kind(state, options.threads, base)
    for number in range(1 + contestant.warm):
        folder = base / f"save{number}"
        folder.mkdir()
        rest()
        used = time.process_time()
        result["go on"] = timed(contestant.save, folder)
        result["durable"] = result["go on"] + timed(contestant.finish, folder)
        result["cpu"] = time.process_time() - used
    result["memory"] = peak.extra() / (1 << 30)
    contestant.close()
    return result


def restore(kind: type[Contestant], state: State, options: argparse.Namespace, base: Path) -> Result:
    """Restores what was saved last over zeros, from the disk and from the page cache."""
    expected = {name: float(tensor.sum()) for name, tensor in state.items()}
    small = shared_state(mmap.PAGESIZE, 1)
    if options.xla:
        state, small = ({name: torch.zeros_like(tensor) for name, tensor in each.items()} for each in (state, small))
        state, small = on_device(state, options), on_device(small, options)
    result, peak, saved = {}, PeakMemory(), base / f"save{int(kind.warm)}"
    with tempfile.TemporaryDirectory(dir=base) as folder:
        first = kind(small, options.threads, Path(folder))
        for _ in range(1 + kind.warm):
            first.save(Path(folder))
            first.finish(Path(folder))
        result["first"] = timed(first.restore, Path(folder))
        first.close()
    contestant = kind(state, options.threads, base)
    for column in ("restore", "cached"):
        for tensor in state.values():
            tensor.zero_()
        rest()
        drop_cache(base)
        if column == "cached":
            read_all(base)
        peak.begin()
        result[column] = timed(contestant.restore, saved)
        result["memory"] = max(result.get("memory", 0.0), peak.extra() / (1 << 30))
        for name, tensor in state.items():
            restored = not kind.fills or float(tensor.cpu().sum()) == expected[name]
            assert restored, f"{name} is not what was saved"
    contestant.close()
    return result


def run(kind: type[Contestant], state: State, options: argparse.Namespace) -> Result:
    """One contestant; it saves in one process and restores in another, as after a crash."""
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        base = Path(name)
        result: Result = apart(partial(save, kind, state, options, base))
        if kind.restore is not Contestant.restore:
            restored: Result = apart(partial(restore, kind, state, options, base))
            result |= {**restored, "memory": max(result["memory"], restored["memory"])}
    rest()
    return result


def measure(gib: float, options: argparse.Namespace) -> list[dict[str, Result]]:
    """All rounds for one size."""
    state = shared_state(int(gib * (1 << 30)), options.tensors)
    contestants = {"memcpy": CONTESTANTS["memcpy"], **ON_XLA} if options.xla else CONTESTANTS
    contestants = {
        name: kind for name, kind in contestants.items() if not options.only or name in (*options.only, "stepmark")
    }
    rounds: list[dict[str, Result]] = []
    on_host = argparse.Namespace(**{**vars(options), "xla": False})

    def one(name: str) -> Result:
        return run(contestants[name], state, on_host if name == "memcpy" else options)

    for _ in range(options.rounds if gib <= 1 else min(options.rounds, options.large_rounds)):
        rounds.append({name: one(name) for name in contestants})
        times = [
            " ".join([name, *(f"{each[column]:.2f}" for column in list(COLUMNS)[:4] if column in each)])
            for name, each in rounds[-1].items()
        ]
        print(f"{gib:g} GiB, round {len(rounds)}: {'; '.join(times)}", flush=True)
    return rounds


def ratio(rounds: list[dict[str, Result]], column: str, names: list[str]) -> float:
    """The median over the rounds of the least of these contestants' times beside Stepmark's."""
    return statistics.median(min(each[name][column] for name in names) / each["stepmark"][column] for each in rounds)


def bars(rounds: list[dict[str, Result]]) -> list[str]:
    """Stepmark's ratios, and whether each holds."""

    def line(what: str, value: float, holds: bool) -> str:
        return f"- {'holds' if holds else 'MISSED'}: {what}: {value:.2f}"

    lines = []
    if "memcpy" in rounds[0]:
        copying = 1 / ratio(rounds, "go on", ["memcpy"])
        lines.append(line("until training may go on, beside memcpy (at most 1.5)", copying, copying <= 1.5))
    if set(RAW) <= rounds[0].keys():
        for column, least in {"durable": 0.85, "restore": 0.95, "cached": 0.95}.items():
            share = ratio(rounds, column, [*RAW])
            lines.append(line(f"speed of raw, {column} (at least {least})", share, share >= least))
    peers = [name for name in rounds[0] if name not in NO_PEERS]
    for column in ("go on", "durable", "restore", "cached"):
        if peers:
            times = ratio(rounds, column, peers)
            lines.append(line(f"the fastest peer's time beside Stepmark's, {column} (at least 1)", times, times >= 1))
    together = [name for name in peers if "async" in name]
    if together:
        least = ratio(rounds, "memory", together)
        lines.append(line("the leanest asynchronous peer's memory beside Stepmark's (at least 1)", least, least > 0.98))
    return lines


def report(gib: float, rounds: list[dict[str, Result]], options: argparse.Namespace) -> str:
    tensors = "" if options.tensors == 64 else f", {options.tensors} tensors"
    lines = [
        f"## {gib:g} GiB{tensors}{', on XLA:CPU' if options.xla else ''}",
        "",
        f"{len(rounds)} rounds, {options.tensors} tensors of fp32, {options.threads} threads",
        "",
        "| | " + " | ".join(f"{column}, {unit}" for column, unit in COLUMNS.items()) + " |",
        "| --- |" + " --- |" * len(COLUMNS),
    ]
    for name in rounds[0]:
        cells = []
        for column in COLUMNS:
            values = [each[name][column] for each in rounds if column in each[name]]
            cells.append(f"{statistics.median(values):.3f}" if values else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    note = "(XLA:CPU lends its buffers to the host; a real device needs its transfer on top.)" if options.xla else ""
    return "\n".join([*lines, "", *bars(rounds), *([note] if note else [])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, nargs="+", default=[1.0, 4.0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--large-rounds", type=int, default=7, help="rounds where the state is larger than 1 GiB")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--only", nargs="+", default=[], help="these contestants, and Stepmark")
    parser.add_argument("--folder", default=None, help="where to save; must be on a disk (default: the temporary one)")
    parser.add_argument("--xla", action="store_true", help="tensors of an XLA device, beside xm.save")
    parser.add_argument("--save", action="store_true", help="append the numbers to results/checkpoint.csv")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    measured = {gib: measure(gib, options) for gib in options.gib}
    tables = [report(gib, rounds, options) for gib, rounds in measured.items()]
    text = "\n\n".join([f"{machine()}, load {load:.1f} at the beginning", *tables])
    print(f"\n{text}")
    if options.save:
        keep("checkpoint", "xla" if options.xla else "", text)


if __name__ == "__main__":
    main()
