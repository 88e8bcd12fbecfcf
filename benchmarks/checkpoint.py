"""Saving and restoring with Stepmark beside memcpy, raw writing and reading, and other ways to save tensors.

    .venv/bin/python benchmarks/checkpoint.py --gib 1 4 --save
    .venv/bin/python benchmarks/checkpoint.py --gib 1 --xla

The contestants run in turn, round after round. Each saves in one process and restores in another, forked from one that
has imported everything and holds the state (64 tensors, fp32) in memory that all of them share. Those that keep memory
from save to save are measured at their second. Before each measurement the disk is left to rest; before restoring, the
files' pages are dropped from the page cache. Printed are medians: seconds until training may go on and until the bytes
are on the disk, seconds to restore into the existing tensors, the peak of extra resident memory of saving and
restoring, and processor seconds of a save; and for Stepmark the medians of the ratios within a round, beside their
bars. "Raw" is the faster of two in each round: one thread through the page cache with fsync, and one past it. Stepmark
checks digests of every byte; of the others, only torch.save's files have any (a CRC, which torch.load does not check).
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
from page_cache import drop_cache  # noqa: E402

TENSORS = 64
COLUMNS = {"go on": "s", "durable": "s", "restore": "s", "memory": "GiB", "cpu": "s"}
Result = dict[str, float]


def shared_state(size: int) -> State:
    """`size` bytes of fp32 in memory that children share, so that none of them copies it by writing to it."""
    state = {}
    for index in range(TENSORS):
        memory = mmap.mmap(-1, size // TENSORS)
        tensor = torch.frombuffer(memory, dtype=torch.float32)
        state[f"layers.{index}.weight"] = tensor.normal_()
    return state


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
    """Restores what was saved last over zeros."""
    expected = {name: float(tensor.sum()) for name, tensor in state.items()}
    if options.xla:
        state = on_device({name: torch.zeros_like(tensor) for name, tensor in state.items()}, options)
    elif kind.fills:
        for tensor in state.values():
            tensor.zero_()
    peak, result = PeakMemory(), {}
    contestant = kind(state, options.threads, base)
    rest()
    drop_cache(base)
    peak.begin()
    result["restore"] = timed(contestant.restore, base / f"save{int(kind.warm)}")
    result["memory"] = peak.extra() / (1 << 30)
    contestant.close()
    for name, tensor in state.items():
        assert float(tensor.cpu().sum()) == expected[name], f"{name} is not what was saved"
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
    state = shared_state(int(gib * (1 << 30)))
    contestants = {"memcpy": CONTESTANTS["memcpy"], **ON_XLA} if options.xla else CONTESTANTS
    rounds: list[dict[str, Result]] = []
    on_host = argparse.Namespace(**{**vars(options), "xla": False})

    def one(name: str) -> Result:
        return run(contestants[name], state, on_host if name == "memcpy" else options)

    for _ in range(options.rounds if gib <= 1 else min(options.rounds, options.large_rounds)):
        rounds.append({name: one(name) for name in contestants})
        times = [
            f"{name} {each['go on']:.2f} {each['durable']:.2f} {each.get('restore', 0):.2f}"
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

    copying = 1 / ratio(rounds, "go on", ["memcpy"])
    lines = [line("until training may go on, beside memcpy (at most 1.5)", copying, copying <= 1.5)]
    if "raw" in rounds[0]:
        for column in ("durable", "restore"):
            share = ratio(rounds, column, ["raw", "raw, direct"])
            lines.append(line(f"speed of raw, {column} (at least 0.85)", share, share >= 0.85))
    peers = [name for name in rounds[0] if name not in ("memcpy", "raw", "raw, direct", "stepmark")]
    for column in ("go on", "durable", "restore"):
        times = ratio(rounds, column, peers)
        lines.append(line(f"the fastest peer's time beside Stepmark's, {column} (at least 1)", times, times >= 1))
    together = [name for name in peers if "async" in name]
    if together:
        least = ratio(rounds, "memory", together)
        lines.append(line("the leanest asynchronous peer's memory beside Stepmark's (at least 1)", least, least > 0.98))
    return lines


def report(gib: float, rounds: list[dict[str, Result]], options: argparse.Namespace) -> str:
    lines = [
        f"## {gib:g} GiB{', on XLA:CPU' if options.xla else ''}",
        "",
        f"{len(rounds)} rounds, {TENSORS} tensors of fp32, {options.threads} threads",
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
