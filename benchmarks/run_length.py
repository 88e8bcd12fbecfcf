"""What a long run costs: its saves, memory, resumption, and what reads its folder, by the number of logged steps.

    .venv-newest/bin/python benchmarks/run_length.py --save

A model of five parameters is trained on the CPU, one rank, in a process of its own. As training begins, the run is set
to step N with a log for each step in its history and its files, an evaluation every 1,000 and a checkpoint every 100
steps, which retention has deleted. Then each of ten steps is logged and saved, one save after the other; their
checkpoints stay. Another process resumes and trains ten more. Columns: the median of the seconds that training waits
for a save, and until it is on disk; the peak of memory beyond that of the shortest run, of the first and the second
process; seconds from the call of `train` to its first step as the run is resumed; seconds of `stepmark inspect` and
`stepmark report` of the folder, start of Python included, and report's peak of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from keeping import keep, machine

SAVES = 10  # of one process
LENGTHS = (1_000, 10_000, 100_000, 1_000_000)
SECOND = 1.79e9  # the time at which the runs began
COLUMNS = {
    "stall": "stall of a save, s", "durable": "on disk, s", "memory": "memory, MB", "resumed_memory": "resumed, MB",
    "resume": "resume, s", "inspect": "inspect, s", "report": "report, s", "report_memory": "report, MB",
}  # fmt: skip


def log_of(step: int) -> dict[str, Any]:
    values = random.Random(step)
    return {
        "step": step, "epoch": step / 7000, "loss": 2 + values.random(), "grad_norm": values.random(),
        "learning_rate": 1e-4 / (1 + step),
    }  # fmt: skip


def write_records(folder: Path, length: int) -> None:
    """Adds what so many logged steps leave in the run's files."""
    with (folder / "metrics.jsonl").open("a") as metrics, (folder / "events.jsonl").open("a") as events:
        for step in range(1, length + 1):
            speeds = dict.fromkeys(("tokens_per_second", "samples_per_second"), 1000 / (1 + step % 7))
            seconds = {f"seconds_{part}": 1 / (1 + step % 9) for part in ("data", "save", "evaluation", "step")}
            sizes = {"host_memory": 868_085_760 + step, "host_memory_peak": 884_170_752, "target_tokens": 40 * step}
            at = SECOND + step
            metrics.write(json.dumps({**log_of(step), **speeds, **seconds, **sizes, "time": at}) + "\n")
            if step % 1000 == 0:
                metrics.write(json.dumps({"step": step, "epoch": step / 7000, "eval_loss": 2.5, "time": at}) + "\n")
            if step % 100 == 0:
                for event in ("save_begun", "saved"):
                    line = {"event": event, "step": step, "stall_seconds": 0.01, "bytes": 5000, "time": at}
                    events.write(json.dumps(line) + "\n")


def train(folder: Path, length: int) -> None:
    """One process, which resumes the run where the folder has one. Writes what it measured to measured.json there."""
    import torch
    from torch.utils.data import TensorDataset
    from transformers import TrainerCallback

    from stepmark import Trainer, TrainingArguments
    from stepmark.trainer.run_folder.log_history import pack

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": ((self.layer(x) - labels) ** 2).mean()}

    class Schedule(TrainerCallback):
        """Sets the run to its length, and takes each step once the save before it has ended."""

        first = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not resumes:
                for step in range(1, length + 1):
                    state.log_history.append(log_of(step))
                    pack(state)
                state.global_step = length
                write_records(folder, length)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.first = self.first or time.perf_counter()
            while state.global_step > length and not (folder / f"checkpoint-{state.global_step}").exists():
                time.sleep(0.01)
            time.sleep(0.1)  # what follows the commit

    resumes = any(folder.glob("checkpoint-*"))
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=length + SAVES * (1 + resumes), save_steps=1, logging_steps=1,
        per_device_train_batch_size=2, disable_tqdm=True, report_to="none", device="cpu",
    )  # fmt: skip
    schedule, rows = Schedule(), TensorDataset(torch.ones(1000, 4), torch.ones(1000, 1))
    collate = lambda rows: {"x": torch.stack([x for x, _ in rows]), "labels": torch.stack([y for _, y in rows])}  # noqa: E731
    trainer = Trainer(Model(), arguments, collate, rows, callbacks=[schedule])
    begun = time.perf_counter()
    trainer.train(resume_from_checkpoint=resumes)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    (folder / "measured.json").write_text(json.dumps({"begin": schedule.first - begun, "memory": peak}))


def timed(command: list[str]) -> tuple[float, float]:
    """Seconds of a command, and its peak of memory in MB."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{command} ended with {status}")
    return time.perf_counter() - begun, usage.ru_maxrss / 1000


def measure(folder: Path, length: int) -> dict[str, float]:
    found = {}
    for name in ("", "resumed_"):
        subprocess.run([sys.executable, __file__, "--folder", str(folder), "--length", str(length)], check=True)
        measured = json.loads((folder / "measured.json").read_text())
        found |= {f"{name}memory": measured["memory"], "resume": measured["begin"]}
        if not name:
            lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
            saves = [line for line in lines if line.get("step", 0) > length + 1]  # memory is allocated in the first one
            for key, event in (("stall", "save_begun"), ("durable", "saved")):
                values = [line[f"{key}_seconds"] for line in saves if line["event"] == event]
                found[key] = statistics.median(values)
    for command in ("inspect", "report"):
        found[command], found[f"{command}_memory"] = timed([sys.executable, "-m", "stepmark", command, str(folder)])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--save", action="store_true", help="append the numbers to results/run_length.csv")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of a process that trains
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.length is not None:
        train(options.folder, options.length)
        return
    found = {}
    for length in options.lengths:
        with tempfile.TemporaryDirectory() as folder:
            found[length] = measure(Path(folder), length)
        print(f"{length}: {found[length]}", flush=True)
    shortest = found[min(found)]
    lines = [f"| logged steps | {' | '.join(COLUMNS.values())} |", f"| {'--- | ' * (1 + len(COLUMNS))}".rstrip()]
    for length, values in found.items():
        for name in ("memory", "resumed_memory"):
            values[f"{name}_beyond"] = values[name] - shortest[name]
        cells = [values.get(f"{name}_beyond", values[name]) for name in COLUMNS]
        lines.append(f"| {length:.0e} steps | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |")
    text = "\n".join([machine(), "", *lines])
    print(f"\n{text}")
    if options.save:
        keep("run_length", "", text)


if __name__ == "__main__":
    main()
