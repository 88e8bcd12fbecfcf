"""Compares saves and restores of an FSDP2 state with torch's own, and with a copy in memory, on CPU ranks over gloo.

    .venv/bin/python benchmarks/fsdp2_checkpoint.py --nproc 2
    .venv/bin/python benchmarks/fsdp2_checkpoint.py --nproc 4 --gib 1 --save

--save appends the numbers to benchmarks/results/fsdp2_checkpoint.csv.

The state is a model under `fully_shard` with AdamW, in plain torch. Contestants: Stepmark's Checkpointer; DCP's
`async_save` with its DefaultStager, which copies in a thread. `returns` is when the call does, `copied` when the
parameters may change, `durable` when all files and folders are synced, on the slowest rank. A memcpy of the rank's
shards, to memory that is there, is the unit of all ratios. Files are restored from the disk. Every round runs each in
turn, after a barrier; the first round warms up.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from keeping import keep, machine  # noqa: E402
from page_cache import drop_cache  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from stepmark import Checkpointer  # noqa: E402
from stepmark.launch.supervisor import supervise  # noqa: E402

WIDTH = 1024
Seconds = Iterator[tuple[str, float]]


def local_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    values = [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    return [value.to_local().detach() if isinstance(value, DTensor) else value for value in values]


def copy_in_memory(sources: list[Tensor], targets: list[Tensor]) -> Seconds:
    begun = time.perf_counter()
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
    yield "memcpy", time.perf_counter() - begun


def read_from_disk(folder: Path) -> None:
    """One tool writes through the page cache, the other past it."""
    if dist.get_rank() == 0:
        drop_cache(folder)
    dist.barrier()


def stepmark(checkpointer: Checkpointer, state: dict[str, Any], step: int) -> Seconds:
    begun = time.perf_counter()
    handle = checkpointer.save(step, state)
    yield "Stepmark, returns", time.perf_counter() - begun
    handle.result()
    dist.barrier()
    yield "Stepmark, durable", time.perf_counter() - begun
    read_from_disk(checkpointer.folder)
    begun = time.perf_counter()
    checkpointer.restore(state, step)
    dist.barrier()
    yield "Stepmark, restored", time.perf_counter() - begun


def torchs(folder: Path, state: dict[str, Any], stager: DefaultStager, group: Any) -> Seconds:
    """`group`: its own, since its thread communicates while the main thread does."""
    begun = time.perf_counter()
    writer = dcp.FileSystemWriter(folder, thread_count=2)
    saving: Any = dcp.async_save(state, storage_writer=writer, async_stager=stager, process_group=group)
    yield "DCP, returns", time.perf_counter() - begun
    saving.staging_completion.result()
    yield "DCP, copied", time.perf_counter() - begun
    saving.upload_completion.result()
    dist.barrier()
    yield "DCP, durable", time.perf_counter() - begun
    read_from_disk(folder)
    begun = time.perf_counter()
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
    dist.barrier()
    yield "DCP, restored", time.perf_counter() - begun


def rank_main(rounds: int, gib: float, folder: Path, out: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    layers = max(1, round(gib * 2**30 / (12 * WIDTH * WIDTH)))  # parameters and two moments, in float32
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    sources = local_tensors(model, optimizer)
    targets = [torch.zeros_like(tensor) for tensor in sources]
    of_model, of_optimizer = get_state_dict(model, optimizer)
    stager = DefaultStager(StagingOptions(False, False, True, False))  # what else it has needs CUDA
    group = dist.new_group(backend="gloo")
    times: dict[str, list[float]] = {}
    with Checkpointer(folder / "stepmark", keep_last=1) as checkpointer:
        for turn in range(rounds + 1):
            for seconds in (
                copy_in_memory(sources, targets),
                stepmark(checkpointer, {"model": model, "optimizer": optimizer}, turn),
                torchs(folder / "dcp", {"model": of_model, "optimizer": of_optimizer}, stager, group),
            ):
                dist.barrier()
                for name, value in seconds:
                    slowest = torch.tensor(value)
                    dist.all_reduce(slowest, dist.ReduceOp.MAX)
                    times.setdefault(name, []).append(float(slowest))
            if rank == 0:
                shutil.rmtree(folder / "dcp")
    stager.close()
    if rank == 0:
        size = sum(tensor.nbytes for tensor in sources) * world / 2**30
        out.write_text(table(size, world, {name: values[1:] for name, values in times.items()}))
    dist.destroy_process_group()


def table(size: float, ranks: int, times: dict[str, list[float]]) -> str:
    lines = [
        f"# An FSDP2 state on {ranks} CPU ranks",
        "",
        f"{size:.2f} GiB of parameters and AdamW states, torch {torch.__version__}, gloo. Ratios are medians of those "
        "within a round, to a memcpy.",
        "",
        machine(),
        "",
        "| | seconds | ratio |",
        "| --- | --- | --- |",
    ]
    for name, values in times.items():
        ratio = statistics.median(value / unit for value, unit in zip(values, times["memcpy"], strict=True))
        lines.append(f"| {name} | {statistics.median(values):.3f} | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gib", type=float, default=1.0, help="the state of all ranks together")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written (default: a temporary folder)")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)  # where rank 0 writes the table
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(arguments.rounds, arguments.gib, arguments.folder, arguments.out)
        return 0
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        out = Path(folder) / "table.md"
        code = supervise([sys.executable, *sys.argv, "--folder", folder, "--out", str(out)], arguments.nproc)
        if code == 0:
            print(out.read_text(), end="")
            if arguments.save:
                keep("fsdp2_checkpoint", f"{arguments.nproc} ranks", out.read_text())
    return code


if __name__ == "__main__":
    sys.exit(main())
