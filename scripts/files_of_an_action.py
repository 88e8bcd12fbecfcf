"""Prints how many source files a batch, a save, a restore, a signal and a foreign checkpoint pass through.

A profiler hook notes each module of Stepmark in which a function begins, in every thread, while a real run of a tiny
model does the thing: one rank, on the CPU, eager. `--names` lists the files.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SEEN: dict[str, set[str]] = {}
NOW: list[str] = []


def note(frame: Any, event: str, argument: Any) -> None:
    """The hook: the file of a function that begins, for the actions that are in progress."""
    if NOW and event == "call":
        head, found, file = frame.f_code.co_filename.rpartition("/stepmark/")
        if found and head.endswith("src") and frame.f_code.co_name != "<module>":
            for action in NOW:
                SEEN.setdefault(action, set()).add(file)


@contextlib.contextmanager
def action(name: str) -> Iterator[None]:
    """Notes files for an action until it is left."""
    NOW.append(name)
    try:
        yield
    finally:
        NOW.remove(name)


def main() -> None:
    """Trains, saves, resumes, is interrupted, and imports; prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", action="store_true", help="list the files")
    names = parser.parse_args().names
    threading.setprofile(note)
    sys.setprofile(note)
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

    from stepmark import Trainer, TrainingArguments
    from stepmark.cli.main import run as call

    def model() -> Any:
        return GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16))

    class Acts(TrainerCallback):
        """Says when a batch begins and ends, and asks the run to stop."""

        def __init__(self, stop_at: int = 0) -> None:
            self.stop_at = stop_at

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1 and "batch" not in SEEN:
                NOW.append("batch")
            elif state.global_step == 2:
                NOW[:] = [each for each in NOW if each != "batch"]
            if state.global_step == self.stop_at:
                NOW.append("signal")
                os.kill(os.getpid(), signal.SIGTERM)
            if state.global_step == 4:
                NOW.append("save")

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            NOW[:] = [each for each in NOW if each != "restore"]

    def trainer(folder: Path, *, stop_at: int = 0, steps: int = 4) -> Trainer:
        rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(16)]
        args = TrainingArguments(
            output_dir=str(folder), max_steps=steps, per_device_train_batch_size=2, save_strategy="steps", save_steps=4,
            logging_steps=10, report_to="none", disable_tqdm=True,
        )  # fmt: skip
        return Trainer(model=model(), args=args, train_dataset=rows, callbacks=[Acts(stop_at)])

    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stderr(io.StringIO()) as said:
        folder = Path(name)
        trainer(folder / "run").train()
        NOW.clear()
        again = trainer(folder / "run", steps=6)
        NOW.append("restore")
        again.train(resume_from_checkpoint=True)
        NOW.clear()
        with contextlib.suppress(SystemExit, BaseException):
            trainer(folder / "stopped", stop_at=3).train()
        NOW.clear()
        source = model()
        source.save_pretrained(folder / "theirs" / "checkpoint-5")
        matrices = [each for each in source.parameters() if each.dim() > 1]
        vectors = [each for each in source.parameters() if each.dim() == 1]
        optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])
        source(input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)).loss.backward()
        optimizer.step()
        theirs = folder / "theirs" / "checkpoint-5"
        torch.save(optimizer.state_dict(), theirs / "optimizer.pt")
        torch.save({"last_epoch": 5, "_step_count": 6}, theirs / "scheduler.pt")
        (theirs / "trainer_state.json").write_text(json.dumps({"global_step": 5, "epoch": 1.0, "log_history": []}))
        with action("foreign checkpoint"), contextlib.redirect_stdout(io.StringIO()):
            code = call(["import", str(theirs), str(folder / "ours")])
    sys.setprofile(None)
    if code:
        sys.exit(f"the import ended with {code}: {said.getvalue()}")
    for each, files in SEEN.items():
        print(f"{each:20} {len(files)}")
        if names:
            print("".join(f"    {file}\n" for file in sorted(files)), end="")


if __name__ == "__main__":
    main()
