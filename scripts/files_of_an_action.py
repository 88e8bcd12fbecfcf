"""Prints how many source files a step, a save, a restore, a signal and a foreign checkpoint pass through.

A profiler hook notes each module of Stepmark in which a function begins, in the thread that acts and those that it
starts, while a real run of a tiny model does the thing, on the CPU, eager; and the pairs of modules that call each
other both ways, where code of others may stand between. A step is one call of `TrainStep`, with two micro-batches and
a `compute_loss` that a subclass overrides; a save begins with the loop's call and ends when the checkpoint is
committed. `--ranks 2` counts those of rank 0 of two; `--names` lists files and pairs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

FILES: dict[str, set[str]] = {}
CALLS: dict[str, set[tuple[str, str]]] = {}
NOW: list[str] = []
OTHERS: set[int] = set()  # threads that ran before an action and are no part of it, such as those of heartbeats


@cache
def module_of(path: str) -> str | None:
    """The path of a file below the package; None for files of others."""
    head, found, file = path.rpartition("/stepmark/")
    return file if found and head.endswith("src") else None


def note(frame: Any, event: str, argument: Any) -> None:
    """The hook: the file of a function that begins, and its caller's, for the actions that are in progress."""
    if not NOW or event != "call" or frame.f_code.co_name == "<module>" or threading.get_ident() in OTHERS:
        return
    file = module_of(frame.f_code.co_filename)
    if file is None:
        return
    caller = frame.f_back
    while caller is not None and module_of(caller.f_code.co_filename) is None:
        caller = caller.f_back
    for action in NOW:
        FILES.setdefault(action, set()).add(file)
        if caller is not None:
            CALLS.setdefault(action, set()).add((module_of(caller.f_code.co_filename) or "", file))


def pairs(action: str) -> list[tuple[str, str]]:
    """The modules that call each other both ways."""
    return sorted((a, b) for a, b in CALLS.get(action, ()) if a < b and (b, a) in CALLS[action])


@contextlib.contextmanager
def action(name: str) -> Iterator[None]:
    """Notes files for an action until it is left; only the first time."""
    first = name not in FILES
    if first:
        NOW.append(name)
        OTHERS.clear()
        OTHERS.update(each.ident or 0 for each in threading.enumerate() if each is not threading.current_thread())
    try:
        yield
    finally:
        if first:
            NOW.remove(name)


def within(name: str, method: Callable[..., Any], *, when: Callable[..., bool] = lambda *_: True) -> Callable[..., Any]:
    """A method whose calls are an action, those for which `when` holds."""

    def called(*given: Any, **options: Any) -> Any:
        with action(name) if when(*given) else contextlib.nullcontext():
            return method(*given, **options)

    return called


def model() -> Any:
    """A GPT-2 whose checkpoint has 112 tensors: parameters and two moments of each."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=16))


def trainer(folder: Path, *, stop_at: int = 0, steps: int = 4) -> Any:
    """A Trainer of the tiny model, whose loss a subclass computes; it is interrupted at `stop_at`."""
    import torch
    from transformers import TrainerCallback

    import stepmark

    class Trainer(stepmark.Trainer):
        def compute_loss(self, *given: Any, **options: Any) -> Any:
            return super().compute_loss(*given, **options)

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == stop_at:
                NOW.append("signal")
                os.kill(os.getpid(), signal.SIGTERM)

    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(32)]
    args = stepmark.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=2, save_strategy="steps", save_steps=4,
        gradient_accumulation_steps=2, logging_steps=10, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    return Trainer(model=model(), args=args, train_dataset=rows, callbacks=[Stop()])


def train(folder: Path) -> None:
    """Notes a step, a save and a restore."""
    from stepmark.checkpoint import Checkpointer
    from stepmark.trainer.training_loop import TrainingLoop
    from stepmark.training.step import TrainStep

    loop: Any = TrainingLoop
    step: Any = TrainStep
    checkpointer: Any = Checkpointer
    step.__call__ = within("step", step.__call__, when=lambda _, number, *__: number == 1)
    loop.restore = within("restore", loop.restore, when=lambda _, resume: bool(resume))
    saves, waits = loop._save, checkpointer.wait

    def save(self: Any) -> None:
        with action("save"):
            saves(self)
            waits(self._checkpointer)

    loop._save = save
    trainer(folder).train()
    trainer(folder, steps=6).train(resume_from_checkpoint=True)


def be_interrupted(folder: Path) -> None:
    """Notes a signal, up to the end of the run."""
    with contextlib.suppress(SystemExit, BaseException):
        trainer(folder, stop_at=3).train()
    NOW.clear()


def import_theirs(theirs: Path, ours: Path) -> int:
    """Notes the import of a checkpoint of transformers' Trainer; returns the exit status."""
    import torch

    from stepmark.cli.main import run as call

    source = model()
    source.save_pretrained(theirs)
    matrices = [each for each in source.parameters() if each.dim() > 1]
    vectors = [each for each in source.parameters() if each.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])
    source(input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)).loss.backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), theirs / "optimizer.pt")
    torch.save({"last_epoch": 5, "_step_count": 6}, theirs / "scheduler.pt")
    (theirs / "trainer_state.json").write_text(json.dumps({"global_step": 5, "epoch": 1.0, "log_history": []}))
    with action("foreign checkpoint"), contextlib.redirect_stdout(io.StringIO()):
        return int(call(["import", str(theirs), str(ours)]))


def main() -> None:
    """Trains, saves, resumes, is interrupted, and imports; prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", action="store_true", help="list the files, and the pairs")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of the run; default: 1")
    options = parser.parse_args()
    if options.ranks > 1 and "RANK" not in os.environ:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.ranks)]
        with tempfile.TemporaryDirectory() as name:
            again = subprocess.run([*launcher, *sys.argv], env={**os.environ, "FILES_FOLDER": name}, check=False)
        sys.exit(again.returncode)
    threading.setprofile(note)
    sys.setprofile(note)
    code = 0
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stderr(io.StringIO()) as said:
        folder = Path(os.environ.get("FILES_FOLDER", name))
        train(folder / "run")
        if options.ranks == 1:
            be_interrupted(folder / "stopped")
            code = import_theirs(folder / "theirs" / "checkpoint-5", folder / "ours")
    sys.setprofile(None)
    if code:
        sys.exit(f"the import ended with {code}: {said.getvalue()}")
    for each, files in FILES.items() if os.environ.get("RANK", "0") == "0" else ():
        both = pairs(each)
        print(f"{each:20} {len(files)} files, {len(both)} pairs that call each other both ways")
        if options.names:
            print("".join(f"    {file}\n" for file in sorted(files)), end="")
            print("".join(f"    {one} <-> {other}\n" for one, other in both), end="")


if __name__ == "__main__":
    main()
