"""What planning a save, its manifest, and planning a restore cost in a large world, without any data.

    .venv/bin/python benchmarks/checkpoint_planner.py

A model of 1000 tensors and its AdamW states (master, exp_avg, exp_avg_sq) on 4096 ranks, 32 to a node, on several
meshes: data parallel ranks hold the same slices of the model, tensor parallel ranks each a slice of every tensor, and
the optimizer states are ranges over the data parallel ranks (ZeRO-1). The planner is the real one, fed with the tables
that the ranks would send each other; what is measured is what one rank does, in a process of its own: decode all
tables, plan, and find its own share. Restoring is planned for ranks of another mesh, from the parsed manifest: the byte
ranges of every file that the rank has to read. Printed are seconds, processor
seconds (on a busy machine the first say little), and the growth of the process's peak memory.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from apart import PeakMemory, apart
from keeping import keep, machine

from stepmark.checkpoint.checkpointer import MAX_FILE_SIZE
from stepmark.checkpoint.format.checksums import bytes_checksum
from stepmark.checkpoint.format.manifest import FileEntry, Manifest, TensorEntry, parse_manifest
from stepmark.checkpoint.save.commit import tensor_entries
from stepmark.checkpoint.save.plan import SavePlan, SliceRecord
from stepmark.checkpoint.save.request import RankReport, SavePlanner, SaveRequest
from stepmark.checkpoint.save.snapshot import extents_of
from stepmark.checkpoint.save.table_exchange import RankTables, encode_rows
from stepmark.sharding.layout import TensorSlice
from stepmark.sharding.overlap import overlaps

SAVE = "0123abcd-000001"
RANKS_PER_NODE = 32
SHAPE = (4096, 1024)
STATES = ("master", "exp_avg", "exp_avg_sq")
MODEL, OPTIMIZER = "model", "optimizer/optimizer"
BARS = {"plan s": 2.0, "plan MB": 500.0, "manifest MB": 20.0, "restore plan s": 5.0}


@dataclass(frozen=True)
class World:
    """A mesh, and what its ranks hold. Ranks next to each other are of one tensor parallel group."""

    ranks: int
    tensors: int
    tensor_parallel: int

    @property
    def data_parallel(self) -> int:
        return self.ranks // self.tensor_parallel

    def name(self) -> str:
        return f"dp {self.data_parallel} x tp {self.tensor_parallel}"

    def _slice(self, rank: int) -> TensorSlice:
        rows = SHAPE[0] // self.tensor_parallel
        return TensorSlice.of_box((rank % self.tensor_parallel * rows, 0), (rows, SHAPE[1]))

    def model(self, rank: int) -> list[SliceRecord]:
        """What the rank holds of the model."""
        tensor_slice = self._slice(rank)
        return [SliceRecord(MODEL, f"layers.{i}.weight", "BF16", SHAPE, tensor_slice) for i in range(self.tensors)]

    def optimizer(self, rank: int) -> list[SliceRecord]:
        """What the rank holds of the optimizer's states: its range over the concatenated slices."""
        tensor_slice = self._slice(rank)
        total, each = tensor_slice.numel * self.tensors, tensor_slice.numel
        place = rank // self.tensor_parallel
        first, last = total * place // self.data_parallel, total * (place + 1) // self.data_parallel
        rows = []
        for i in range(first // each, -(-last // each)):
            part = TensorSlice(tensor_slice.box, max(0, first - i * each), min(each, last - i * each))
            rows += [SliceRecord(OPTIMIZER, f"layers.{i}.weight/{key}", "F32", SHAPE, part) for key in STATES]
        return rows

    def tables(self) -> Iterator[RankTables]:
        """What each rank sends."""
        models = [encode_rows(self.model(rank)) for rank in range(self.tensor_parallel)]
        for rank in range(self.ranks):
            rows = {MODEL: models[rank % self.tensor_parallel], OPTIMIZER: encode_rows(self.optimizer(rank))}
            yield RankTables(rows, b"{}")


class Everyone:
    """Stands for the meeting of all ranks: gives each rank what all have sent."""

    rank = -1  # none of them: what they send is there already

    def __init__(self, sent: list[dict[tuple[str, str], bytes]]) -> None:
        self._sent = sent

    def all_gather(self, value: Any, what: str, board: Any = None) -> list[Any]:
        return self._sent


def packed_tables(world: World) -> tuple[list[dict[str, str]], list[dict[tuple[str, str], bytes]]]:
    """All ranks' checksums, and each distinct table, compressed, with the first rank that holds it."""
    checksums, sent, seen = [], [], set()
    for tables in world.tables():
        own = {group: bytes_checksum(data) for group, data in tables.rows.items()}
        checksums.append(own)
        new = {key: tables.rows[key[0]] for key in own.items() if key not in seen}
        seen |= new.keys()
        sent.append({key: zlib.compress(data, 1) for key, data in new.items()})
    return checksums, sent


def plan_of(world: World, checksums: list[dict[str, str]], sent: list[dict[tuple[str, str], bytes]]) -> SavePlan:
    """What one rank does before it copies."""
    tables = RankTables({}, b"{}")
    draft = SaveRequest(Path(), [], tables, Manifest(1, SAVE, 0.0, {}, world.ranks, {}, False, {}))
    meeting: Any = Everyone(sent)
    nodes = [rank // RANKS_PER_NODE for rank in range(world.ranks)]
    answers = [RankReport(1, None, {**own, "": bytes_checksum(tables.values)}) for own in checksums]
    plan, _ = SavePlanner(meeting, nodes, MAX_FILE_SIZE).plan(draft, answers)
    extents_of(plan, world.ranks // 2)
    return plan


def manifest_of(world: World, plan: SavePlan) -> bytes:
    """What rank 0 writes."""
    files = tuple(
        FileEntry(file.name, file.size, "0" * 32, file.header_size, tuple((s.rank, s.end) for s in file.shares))
        for file in plan.files
    )
    mesh = {"dp": world.data_parallel, "tp": world.tensor_parallel}
    return Manifest(1, SAVE, 0.0, {}, world.ranks, mesh, False, {}, files, tensor_entries(plan)).to_bytes()


def restore_plan(data: bytes, world: World, rank: int) -> int:
    """Parses the manifest and finds all that a rank of `world` reads; the number of elements, for a check."""
    manifest = parse_manifest(data)
    elements = 0
    for row in [*world.model(rank), *world.optimizer(rank)]:
        entry: TensorEntry = manifest.tensors[row.group][row.name]
        found = sum(pair.box.numel for _, stored in entry.slices for pair in overlaps(stored, row.slice))
        assert found == row.slice.numel, f"{row.name}: {found} of {row.slice.numel} elements"
        elements += found
    return elements


def cost(function: Callable[..., Any], *arguments: Any) -> dict[str, float]:
    """Seconds, processor seconds and megabytes that a call takes in a process of its own."""

    def run() -> dict[str, float]:
        peak = PeakMemory()
        peak.begin()
        started, used = time.perf_counter(), time.process_time()
        function(*arguments)
        seconds, cpu = time.perf_counter() - started, time.process_time() - used
        return {"s": seconds, "cpu s": cpu, "MB": peak.extra() / 1e6}

    found: dict[str, float] = apart(run)
    return found


def measure(world: World, other: World) -> dict[str, Any]:
    """One row of the table: a save on `world`, restored on `other`."""
    checksums, sent = packed_tables(world)
    planning = cost(plan_of, world, checksums, sent)
    plan = plan_of(world, checksums, sent)
    data = manifest_of(world, plan)
    restoring = cost(restore_plan, data, other, other.ranks // 2 + 1)
    return {
        "mesh": world.name(),
        "plan s": planning["s"],
        "plan cpu s": planning["cpu s"],
        "plan MB": planning["MB"],
        "files": len(plan.files),
        "pieces": sum(len(file.tensors) for file in plan.files),
        "manifest MB": len(data) / 1e6,
        "manifest s": cost(manifest_of, world, plan)["s"],
        "restored on": other.name(),
        "restore plan s": restoring["s"],
        "restore plan cpu s": restoring["cpu s"],
        "restore plan MB": restoring["MB"],
    }


def report(options: argparse.Namespace, rows: list[dict[str, Any]]) -> str:
    names = list(rows[0])
    elements = options.tensors * math.prod(SHAPE) / 1e9
    lines = [
        machine(),
        f"{options.ranks} ranks, {RANKS_PER_NODE} to a node, {options.tensors} tensors of {list(SHAPE)} "
        f"({elements:.1f} billion elements), {len(STATES)} optimizer states each as ranges over dp",
        "",
        f"| {' | '.join(names)} |",
        f"| {' | '.join('---' for _ in names)} |",
        *(f"| {' | '.join(f'{v:.2f}' if isinstance(v, float) else str(v) for v in row.values())} |" for row in rows),
        "",
        "bars: " + ", ".join(f"{name} below {bar:g}" for name, bar in BARS.items()),
        *(
            f"missed: {row['mesh']}: {name} {row[name]:.2f}"
            for row in rows
            for name, bar in BARS.items()
            if row[name] >= bar
        ),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--save", action="store_true", help="append the numbers to results/checkpoint_planner.csv")
    options = parser.parse_args()
    torch.set_num_threads(1)
    degrees = [1, 8, 32]
    worlds = [World(options.ranks, options.tensors, degree) for degree in degrees]
    others = [World(options.ranks // 2, options.tensors, degree) for degree in (16, 1, 2)]
    rows = []
    for world, other in zip(worlds, others, strict=True):
        rows.append(measure(world, other))
        print(json.dumps(rows[-1]), flush=True)
    table = report(options, rows)
    print(f"\n{table}")
    if options.save:
        keep("checkpoint_planner", f"{options.ranks} ranks", table)


if __name__ == "__main__":
    main()
