"""From the start of a process to the end of its first step: a script with transformers' Trainer, and with Stepmark's.

    .venv-newest/bin/python benchmarks/first_step.py --rounds 9 --save

The scripts are the same but for one import: a small GPT-2 of random weights on a CPU, one rank. They run in turn, each
in a process of its own; the first round fills the page cache. A bare loop with torch and transformers' model, without a
Trainer, runs beside them. --save appends the numbers to benchmarks/results/first_step.csv.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

from keeping import keep, machine

MODEL = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=512))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 512, (64, 128))]
"""
TRAINER = """
from PACKAGE import Trainer, TrainingArguments
from transformers import TrainerCallback
class First(TrainerCallback):
    def on_step_end(self, args, state, control, **known):
        import os
        print("first step", flush=True)
        os._exit(0)
args = TrainingArguments(output_dir="out", report_to="none", ON_THE_CPU, save_strategy="no", disable_tqdm=True)
Trainer(model, args, train_dataset=rows, callbacks=[First()]).train()
"""
LOOP = """
optimizer = torch.optim.AdamW(model.parameters())
batch = {name: torch.stack([row[name] for row in rows[:8]]) for name in ("input_ids", "labels")}
model.train()
model(**batch).loss.backward()
optimizer.step()
print("first step", flush=True)
import os
os._exit(0)
"""
SCRIPTS = {
    "transformers' Trainer": MODEL + TRAINER.replace("PACKAGE", "transformers").replace("ON_THE_CPU", "use_cpu=True"),
    "Stepmark's Trainer": MODEL + TRAINER.replace("PACKAGE", "stepmark").replace("ON_THE_CPU", 'device="cpu"'),
    "a loop by hand": MODEL + LOOP,
}
FIRST = next(iter(SCRIPTS))


def seconds_to_the_first_step(script: str) -> float:
    """Of a new process in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
        begun = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-c", script], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        found = next((time.perf_counter() - begun for line in process.stdout if "first step" in line), None)
        process.wait()
    if found is None:
        raise RuntimeError("a script ended without a step")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in SCRIPTS}
    for turn in range(options.rounds + 1):
        for name, script in SCRIPTS.items():
            seconds = seconds_to_the_first_step(script)
            if turn:
                times[name].append(seconds)
        print(f"round {turn} of {options.rounds}", file=sys.stderr)
    lines = [
        "# Seconds from the start of a process to the end of its first step",
        "",
        f"{machine()}, {options.rounds} rounds. Ratios are medians of those within a round.",
        "",
        "| script | seconds | by transformers' |",
        "| --- | --- | --- |",
    ]
    for name, each in times.items():
        ratio = statistics.median(own / theirs for own, theirs in zip(each, times[FIRST], strict=True))
        lines.append(f"| {name} | {statistics.median(each):.2f} | {ratio:.2f} |")
    print("\n".join(lines))
    if options.save:
        keep("first_step", "", "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
