"""How long training waits for a save: Stepmark beside a memcpy and beside DCP's `async_save` with its `DefaultStager`.

    .venv/bin/python benchmarks/checkpoint_stall.py --rounds 11 --save

A GPT-2 of the small size (124 M parameters) with its AdamW states, 1.5 GB together, is trained on the CPU in a loop of
one rank and one process. In each round every contestant saves once, in changing order, and a step follows; another step
is taken without a save. A save has ended before the next one begins. Columns: seconds of the call; seconds that the
call and the step after it take beyond a step without a save, which include waiting before the update and what copying
and writing beside the passes takes from them; and the peak of resident memory beyond that before the call. Printed are
medians, and medians of ratios within a round. DCP stages in the call, or in a thread of its own; then the loop waits
for it before the update, as its documentation says.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_NUM_THREADS", "2")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from apart import PeakMemory  # noqa: E402
from checkpoint_contestants import copy_blocks, huge_memory  # noqa: E402
from keeping import keep, machine  # noqa: E402
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel  # noqa: E402

from stepmark import Checkpointer  # noqa: E402

NONE = "no save"
Action = Callable[[], Any]
Begun = tuple[Action, Action]  # what to call before the update, and to wait for the end of the save


def nothing() -> None:
    pass


class Loop:
    """A model in training, and the contestants that save it."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        torch.manual_seed(0)
        self.options, self.folder, self.number = options, folder, 0
        self.model = GPT2LMHeadModel(GPT2Config(n_layer=options.layers))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.tokens = torch.randint(0, 50257, (1, options.length))
        self.step()
        states = self.optimizer.state.values()
        self.tensors = [*self.model.parameters(), *(value for state in states for value in state.values())]
        self.size = sum(tensor.nbytes for tensor in self.tensors)
        self.memory = huge_memory(self.size)
        self.checkpointer = Checkpointer(folder / "stepmark", keep_last=1, threads=options.threads)
        self.stagers = [DefaultStager(StagingOptions(False, False, apart, False)) for apart in (False, True)]
        self.contestants: dict[str, Callable[[], Begun]] = {
            NONE: lambda: (nothing, nothing),
            "memcpy": self.memcpy,
            "stepmark": self.stepmark,
            "DCP async_save, DefaultStager": partial(self.dcp, self.stagers[0]),
            "DCP async_save, DefaultStager in a thread": partial(self.dcp, self.stagers[1]),
        }

    def step(self, before_update: Action = nothing) -> None:
        self.model(input_ids=self.tokens, labels=self.tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def memcpy(self) -> Begun:
        at = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        pairs = []
        for tensor in self.tensors:
            pairs.append((at, tensor.data_ptr(), tensor.nbytes))
            at += tensor.nbytes
        copy_blocks(pairs, self.options.threads)
        return nothing, nothing

    def stepmark(self) -> Begun:
        self.number += 1
        handle = self.checkpointer.save(self.number, {"model": self.model, "optimizer": self.optimizer})
        return nothing, handle.result

    def dcp(self, stager: DefaultStager) -> Begun:
        self.number += 1
        folder = self.folder / f"dcp-{self.number}"
        writer = dcp.FileSystemWriter(folder, thread_count=self.options.threads)
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        found: Any = dcp.async_save(
            state, checkpoint_id=folder, storage_writer=writer, no_dist=True, async_stager=stager
        )
        staged = getattr(found, "staging_completion", None)

        def finish() -> None:
            getattr(found, "upload_completion", found).result()
            shutil.rmtree(folder)

        return (nothing if staged is None else staged.result), finish

    def measure(self, name: str) -> dict[str, float]:
        os.sync()
        time.sleep(0.3)
        peak = PeakMemory()
        peak.begin()
        started = time.perf_counter()
        before_update, finish = self.contestants[name]()
        called = time.perf_counter()
        self.step(before_update)
        ended = time.perf_counter()
        extra = peak.extra() / (1 << 30)
        finish()
        return {"call, s": called - started, "with a step, s": ended - started, "memory, GiB": extra}

    def close(self) -> None:
        self.checkpointer.close()
        for stager in self.stagers:
            stager.close()


def report(loop: Loop, rounds: list[dict[str, dict[str, float]]]) -> str:
    def median(value: Callable[[dict[str, dict[str, float]]], float]) -> float:
        return statistics.median(map(value, rounds))

    lines = [
        f"{machine()}, {loop.size / 1e9:.2f} GB, {len(rounds)} rounds, {loop.options.threads} threads",
        "",
        "| | call, s | call and the step after it beyond a step, s | memory, GiB | call / memcpy |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in loop.contestants:
        cells = [
            median(lambda found, name=name: found[name]["call, s"]),
            median(lambda found, name=name: found[name]["with a step, s"] - found[NONE]["with a step, s"]),
            median(lambda found, name=name: found[name]["memory, GiB"]),
            median(lambda found, name=name: found[name]["call, s"] / found["memcpy"]["call, s"]),
        ]
        lines.append(f"| {name} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |")
    share = median(lambda found: found["stepmark"]["call, s"] / found["memcpy"]["call, s"])
    peers = [name for name in loop.contestants if name.startswith("DCP")]
    times = median(lambda found: min(found[name]["call, s"] for name in peers) / found["stepmark"]["call, s"])
    return "\n".join(
        [
            *lines,
            "",
            f"- {'holds' if share <= 0.2 else 'MISSED'}: the call beside a memcpy (at most 0.2): {share:.3f}",
            f"- {'holds' if times >= 1 else 'MISSED'}: DCP's fastest call beside Stepmark's (at least 1): {times:.2f}",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=64, help="tokens of a step")
    parser.add_argument("--folder", default=None, help="where to save; must be on a disk (default: the temporary one)")
    parser.add_argument("--save", action="store_true", help="append the numbers to results/checkpoint_stall.csv")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        loop = Loop(options, Path(folder))
        rounds = []
        for number in range(1 + options.rounds):  # memory is allocated in the first one, which does not count
            names = random.Random(number).sample(list(loop.contestants), len(loop.contestants))
            rounds.append({name: loop.measure(name) for name in names})
            print(f"round {number}: " + "; ".join(f"{k} {v['call, s']:.3f}" for k, v in rounds[-1].items()), flush=True)
        loop.close()
        text = report(loop, rounds[1:])
    print(f"\n{text}")
    if options.save:
        keep("checkpoint_stall", "", text)


if __name__ == "__main__":
    main()
