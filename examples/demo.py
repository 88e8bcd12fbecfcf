"""Stepmark in two minutes: train, get killed, resume, prove that nothing was lost, and let the model write Python.

Trains examples/demo.yaml on two ranks, kills the job in the middle, and corrupts its newest checkpoint; runs the same
command again, and goes on with the model divided between the ranks. Does the same once more, undisturbed, into another
folder; and compares. Then the run goes on until its model writes text that looks like Python. Everything is written to
demo/. The exit code is 1 if the disturbed run differs from the undisturbed one in a single bit.

    python examples/demo.py [--device xla]      # a lazy device, up to the comparison
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from demo_curve import draw
from demo_history import History, read_history
from demo_tokenizer import VOCABULARY, make_tokenizer

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "demo"
RUN, UNDISTURBED, CURVE, REPORT = DEMO / "run", DEMO / "undisturbed", DEMO / "loss.png", DEMO / "report.html"
TOKENIZER = DEMO / "tokenizer"
COMMAND = ("stepmark", "train", "examples/demo.yaml", "--nproc", "2")

KILL_AFTER = 50  # a step between two checkpoints, those of steps 40 and 60
CORRUPTED = 40
STEPS = 70  # the 60 of the recipe, and some on another mesh
OTHER_MESH = ("--max_steps", f"{STEPS}", "--tensor_parallel_size", "2", "--gradient_accumulation_steps", "2")
LAST_STEP = 400
LONGER = ("--device", "cpu", "--max_steps", f"{LAST_STEP}", "--logging_steps", "20", "--save_steps", "200")
EVALUATED = ("--eval_steps", "200", "--max_eval_samples", "128")
PROMPTS = ("class Reader:\n    def __init__(self,", "    def read(self, name", "def main():\n    parser")
NEW_TOKENS = 90


def main() -> int:
    parser = argparse.ArgumentParser(description="kills a run and compares it with an undisturbed one")
    parser.add_argument("--device", default="cpu", choices=["cpu", "xla"], help="what is trained on (default: cpu)")
    device = ("--device", parser.parse_args().device)
    began = time.monotonic()
    os.chdir(ROOT)
    shutil.rmtree(DEMO, ignore_errors=True)
    say(f"A small Llama learns Python's standard library. First its tokenizer, of {VOCABULARY:,} tokens.")
    make_tokenizer(TOKENIZER)

    say("1. Train on two ranks, and get killed on the way.")
    killed_at = train_until_killed(*device)
    corrupt(RUN / f"checkpoint-{CORRUPTED}" / "model.safetensors")

    say("2. The same command again: it quarantines that checkpoint, and resumes from the one before.")
    train(*device)

    say("3. The run goes on, on another mesh: the ranks divide the model (tensor parallelism).")
    train(*device, *OTHER_MESH)

    say("4. The same training once more, undisturbed, into another folder.")
    undisturbed_folder = ("--output_dir", str(UNDISTURBED.relative_to(ROOT)))
    train(*device, *undisturbed_folder)
    train(*device, *undisturbed_folder, *OTHER_MESH)

    say("5. The comparison.")
    run, undisturbed = read_history(RUN), read_history(UNDISTURBED)
    draw(run, undisturbed, killed_at, CURVE)
    equal = compare(run, undisturbed)

    say(f"6. The run goes on from checkpoint-{STEPS}, on the first mesh, and for longer.")
    train(*LONGER, *EVALUATED)
    show_evaluation(read_history(RUN))
    show_samples(RUN / f"checkpoint-{LAST_STEP}")

    write_report()
    print(f"\nThe loss of both runs up to step {STEPS} is drawn in {CURVE.relative_to(ROOT)}.")
    print(f"The demo took {minutes(time.monotonic() - began)}.")
    print(f"The report of both runs, to be opened in a browser, is {REPORT.relative_to(ROOT)}")
    return 0 if equal else 1


def train(*flags: str) -> None:
    """Runs the training command to its end; exits if it fails."""
    with started(*flags) as job:
        code = job.wait()
    if code != 0:
        sys.exit(f"error: the training ended with exit code {code}")


def train_until_killed(*flags: str) -> int:
    """Runs the training command, kills launcher and ranks once step KILL_AFTER is logged, and returns the last step."""
    with started(*flags) as job:
        while KILL_AFTER not in read_history(RUN).steps:
            if job.poll() is not None:
                sys.exit(f"error: the training ended with exit code {job.returncode} before it could be killed")
            time.sleep(0.1)
        ranks = children(job.pid)
        for process in (job.pid, *ranks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        job.wait()
        while any(alive(process) for process in ranks):
            time.sleep(0.1)
    if sys.stderr.isatty():
        print("\x1b[?25h", file=sys.stderr)  # the killed progress bar had hidden the cursor
    last = max(read_history(RUN).steps)
    kept = max(int(folder.name.split("-")[1]) for folder in RUN.glob("checkpoint-*"))
    print(f"killed the launcher and its {len(ranks)} ranks with SIGKILL after step {last}; checkpoint-{kept} is there")
    return last


def corrupt(file: Path) -> None:
    """Flips one bit of a file."""
    with file.open("r+b") as opened:
        opened.seek(-100, os.SEEK_END)
        byte = opened.read(1)[0]
        opened.seek(-100, os.SEEK_END)
        opened.write(bytes([byte ^ 1]))
    print(f"flipped one bit of {file.relative_to(ROOT)}")


@contextlib.contextmanager
def started(*flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """Starts the training command, and terminates it on exit if it still runs."""
    print("$", " ".join([*COMMAND, *flags]), flush=True)
    job = subprocess.Popen([sys.executable, "-m", *COMMAND, *flags])
    try:
        yield job
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait()


def children(parent: int) -> list[int]:
    """The processes that `parent` has started."""
    return [process for process in processes() if stat(process)[1:2] == [str(parent)]]


def alive(process: int) -> bool:
    """Whether a process is still running; a zombie is not."""
    return stat(process)[:1] not in ([], ["Z"])


def processes() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]


def stat(process: int) -> list[str]:
    """A process's state, parent and so on from /proc/PID/stat (see proc(5)); empty if it has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def compare(run: History, undisturbed: History) -> bool:
    """Whether losses, gradient norms, evaluations and final weights are the same to the last bit."""
    weights = [(folder / "model.safetensors").read_bytes() for folder in (RUN, UNDISTURBED)]
    again = [run.steps[step][0] == loss for step, loss in run.first_try.items()]
    same = sum(run.steps.get(step) == values for step, values in undisturbed.steps.items())
    verdicts = {
        f"loss and gradient norm of {same} of {STEPS} steps": same == STEPS == len(run.steps),
        f"loss of the {len(again)} steps that were trained again": all(again),
        f"loss of {len(undisturbed.evaluations)} evaluations": run.evaluations == undisturbed.evaluations,
        f"final weights, {len(weights[0]) / 1e6:.1f} MB": weights[0] == weights[1],
    }
    resumed = ", ".join(map(str, run.resumed))
    print(f"Killed, corrupted, and resumed from steps {resumed}, against the undisturbed run, bit for bit:")
    for what, holds in verdicts.items():
        print(f"  {'equal    ' if holds else 'DIFFERENT'}  {what}")
    return all(verdicts.values())


def show_evaluation(run: History) -> None:
    print("\nEvaluation on held-out files:")
    for step, loss in run.evaluations.items():
        print(f"  step {step:4}   loss {loss:.4f}   perplexity {math.exp(loss):.2f}")


def show_samples(checkpoint: Path) -> None:
    """Generates text with the model, loaded as any Hugging Face model is."""
    os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1", PJRT_DEVICE="CPU")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    name = checkpoint.relative_to(ROOT)
    model = AutoModelForCausalLM.from_pretrained(name)
    tokenizer = AutoTokenizer.from_pretrained(name)
    torch.manual_seed(0)
    print(f'\nSamples, as the model writes them, loaded with AutoModelForCausalLM.from_pretrained("{name}"):')
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        written = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=True, temperature=0.5, top_p=0.95)
        print("  |")
        for line in str(tokenizer.decode(written[0], skip_special_tokens=True)).splitlines():
            print(f"  | {line}")


def write_report() -> None:
    """Writes one page about the run, with the undisturbed one over it."""
    command = (sys.executable, "-m", "stepmark", "report", str(RUN), str(UNDISTURBED), "--out", str(REPORT))
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def say(text: str) -> None:
    print(f"\n{text}", flush=True)


def minutes(seconds: float) -> str:
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"


if __name__ == "__main__":
    sys.exit(main())
