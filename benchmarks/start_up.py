"""Where the time of `stepmark train` goes, from the start of its process to the end of its first step.

    .venv/bin/python benchmarks/start_up.py --rounds 3 --save
    .venv/bin/python benchmarks/start_up.py --only cpu-1-new --rounds 1

Each case is a run of the command on a recipe: a tiny GPT-2 of random weights on half a megabyte of text, with and
without its tokens in the cache, or one with 124 M parameters that is read from a safetensors file; on the CPU or a lazy
device, as one rank or two. Every rank of the command notes the time at the end of each stage: a `sitecustomize` of
this file's, which Python imports first, wraps the functions that end them. The slowest rank counts. The first round
fills the page cache and is left out. --save appends the numbers to benchmarks/results/start_up.csv.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from keeping import keep, machine

STAGES = {
    "recipe checked": "Python, the command line, the checks of the recipe; several ranks: all of it twice",
    "torch": "import torch, and torch_xla",
    "transformers": "import transformers, and peft if it is installed",
    "device": "opening the device, meeting the other ranks",
    "tokenizer": "importing the Trainer, making the tokenizer",
    "data": "reading and tokenizing the text, or its cache",
    "model": "importing the model's class, drawing or reading its weights",
    "trainer": "optimizer, mesh, collator",
    "first step": "the first batch, tracing and compiling, the step",
}
SITE = """
import importlib.util, json, os, sys, time

NOTES = os.environ["STEPMARK_START_UP"]


def note(stage):
    name = f"{NOTES}/{os.environ.get('RANK', '0')}"
    with open(name, "a") as file:
        file.write(json.dumps([stage, time.clock_gettime(time.CLOCK_MONOTONIC)]) + "\\n")


def after(owner, name, stage):
    function = getattr(owner, name)

    def noted(*arguments, **options):
        result = function(*arguments, **options)
        note(stage)
        return result

    setattr(owner, name, noted)


def change_train(module):
    note("torch")
    for name, stage in (("_check_choices", "transformers"), ("prepare_data", "data")):
        after(module, name, stage)
    after(sys.modules["stepmark.trainer.run"], "start", "device")
    prepare = module.prepare_data

    def noted(*arguments):
        note("tokenizer")
        return prepare(*arguments)

    module.prepare_data = noted
    after(module, "build_trainer", "trainer")


def change_loop(module):
    step = module.TrainingLoop._train_step

    def noted(self, batch):
        step(self, batch)
        if "torch_xla" in sys.modules and self._parts.context.runtime.lazy:
            sys.modules["torch_xla"].sync(wait=True)
        note("first step")
        os._exit(0)

    module.TrainingLoop._train_step = noted


CHANGES = {
    "stepmark.recipe.train": change_train,
    "stepmark.recipe.model": lambda module: after(module, "build_model", "model"),
    "stepmark.trainer.training_loop": change_loop,
}


class AfterImport:
    def find_spec(self, name, path=None, target=None):
        if name == "stepmark.recipe.train":
            note("recipe checked")
        if name not in CHANGES:
            return None
        change = CHANGES.pop(name)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, AfterImport())
"""
NEW = {"config_name": "gpt2", "config_overrides": {"n_layer": 2, "n_embd": 64, "n_head": 2}, "tokenizer_name": "bytes"}
DATA = ("new", "cached")


def recipe(folder: Path, kind: str, device: str) -> Path:
    fields = {
        "output_dir": str(folder / "out"),
        "train_file": str(folder / "text.txt"),
        "block_size": 128,
        "per_device_train_batch_size": 4,
        "max_steps": 1,
        "save_strategy": "no",
        "device": device,
        **(NEW if kind in DATA else {"model_name_or_path": str(folder / "pretrained"), "tokenizer_name": "bytes"}),
    }
    path = folder / f"{kind}-{device}.yaml"
    path.write_text(json.dumps(fields))  # which is YAML, too
    return path


def write_inputs(folder: Path, *, pretrained: bool) -> None:
    words = ["a", "first", "step", "is", "what", "everybody", "waits", "for"]
    lines = [" ".join(words[(line * 5 + at * at) % len(words)] for at in range(20)) for line in range(6000)]
    (folder / "text.txt").write_text("\n".join(lines))
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    if pretrained:
        from transformers import GPT2Config, GPT2LMHeadModel

        GPT2LMHeadModel(GPT2Config()).save_pretrained(folder / "pretrained")


def stages_of_a_run(folder: Path, path: Path, nproc: int, cache: Path) -> dict[str, float]:
    """Seconds of each stage, of the rank that was last to end it."""
    with tempfile.TemporaryDirectory() as notes:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PJRT_DEVICE": "CPU",
            "PYTHONPATH": os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")]),
            "STEPMARK_START_UP": notes,
            "STEPMARK_CACHE": str(cache),
        }
        more = ["--nproc", str(nproc)] if nproc > 1 else []
        command = [sys.executable, "-m", "stepmark", "train", str(path), *more]
        begun = time.clock_gettime(time.CLOCK_MONOTONIC)
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
        ranks = [dict(json.loads(line) for line in file.open()) for file in Path(notes).iterdir()]
    if len(ranks) != nproc or any(set(STAGES) - set(rank) for rank in ranks):
        raise RuntimeError(f"a run ended without a step:\n{done.stderr}")
    ends = [begun, *(max(rank[stage] for rank in ranks) for stage in STAGES)]
    return {stage: end - begin for stage, begin, end in zip(STAGES, ends, ends[1:], strict=False)}


def measure(cases: dict[str, tuple[str, int, str]], rounds: int) -> dict[str, dict[str, float]]:
    """Medians of each case's stages."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, pretrained=any(kind == "pretrained" for _, _, kind in cases.values()))
        for turn in range(rounds + 1):
            for case, (device, nproc, kind) in cases.items():
                cache = folder / (f"cache-{turn}-{case}" if kind == "new" else "cache")
                stages = stages_of_a_run(folder, recipe(folder, kind, device), nproc, cache)
                if turn:
                    found[case].append(stages)
            print(f"round {turn} of {rounds}", file=sys.stderr)
    return {
        case: {stage: statistics.median(run[stage] for run in runs) for stage in STAGES} for case, runs in found.items()
    }


def table(medians: dict[str, dict[str, float]], rounds: int) -> str:
    lines = [
        "# Where the time of `stepmark train` goes until the end of its first step",
        "",
        f"{machine()}, {rounds} rounds. Seconds, medians; cases: device, ranks, model.",
        "",
        f"| stage | {' | '.join(medians)} |",
        "| --- |" + " --- |" * len(medians),
    ]
    for stage, what in STAGES.items():
        cells = " | ".join(f"{each[stage]:.2f}" for each in medians.values())
        lines.append(f"| {stage}: {what} | {cells} |")
    lines.append(f"| sum | {' | '.join(f'{sum(each.values()):.2f}' for each in medians.values())} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--devices", default="cpu,xla", help="default: %(default)s")
    parser.add_argument("--only", metavar="CASE", help="one case, such as cpu-2-cached")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    kinds = (*DATA, "pretrained")
    every = [(device, ranks, kind) for device in options.devices.split(",") for ranks in (1, 2) for kind in kinds]
    cases = {"-".join(map(str, case)): case for case in every}
    if options.only is not None:
        if options.only not in cases:
            parser.error(f"--only: {options.only} is not among {', '.join(cases)}")
        cases = {options.only: cases[options.only]}
    text = table(measure(cases, options.rounds), options.rounds)
    print(text)
    if options.save:
        keep("start_up", options.only or options.devices, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
