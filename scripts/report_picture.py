"""Makes docs/report.png, the report of a real run that is killed, finds its newest checkpoint corrupted, and resumes;
and docs/screenshots/, the runs of a sweep, at three widths, one of them dark.

    python scripts/report_picture.py [FOLDER]

Trains a small GPT-2 on the standard library's source on two CPU ranks, into FOLDER (default: runs/first in the current
folder), and smaller ones into the folder `sweep` beside it. Needs Chromium. Takes a few minutes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from examples.sweep import main as train_all  # noqa: E402
from stepmark.trainer.run_folder.run_log import read_metrics  # noqa: E402
from tests.support.browser import screenshot  # noqa: E402

WIDTHS, HEIGHT, COLORS = {"wide-light": 1280, "tablet-dark": 768, "phone-light": 390}, 1600, 128
SWEPT = [
    "--learning_rate",
    "1e-4",
    "1e-3",
    "1e-2",
    "--lr_scheduler_type",
    "linear",
    "cosine_with_restarts",
    "--seed",
    "0",
    "1",
    "2",
]
SMALL = {"config_overrides": "{n_layer: 1, n_embd: 32, n_head: 2}", "block_size": 32, "max_steps": 150}
STEPS, SAVE_EVERY, KILL_AFTER, DAMAGED = 300, 30, 205, 180
FIELDS = {
    "device": "cpu",
    "config_name": "gpt2",
    "config_overrides": "{n_layer: 2, n_embd: 96, n_head: 4, n_positions: 64}",
    "tokenizer_name": "bytes",
    "dataset_name": "python-stdlib",
    "block_size": 64,
    "max_steps": STEPS,
    "per_device_train_batch_size": 4,
    "learning_rate": "3e-3",
    "warmup_steps": 20,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": SAVE_EVERY,
    "sample_prompts": '["def ", "class ", "import "]',
    "sample_tokens": 24,
    "max_eval_samples": 64,
    "save_steps": SAVE_EVERY,
    "save_total_limit": 4,
    "resume_from_checkpoint": "true",
    "disable_tqdm": "true",
}


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/first")  # as it stands in the pictures
    shutil.rmtree(folder, ignore_errors=True)
    flags = [part for name, value in FIELDS.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "stepmark", "train", "--nproc", "2", "--output_dir", str(folder), *flags]
    job = subprocess.Popen(command)
    while not any(line.get("step", 0) >= KILL_AFTER for line in read_metrics(folder)):
        if job.poll() is not None:
            return 1
        time.sleep(0.02)
    os.kill(job.pid, signal.SIGKILL)  # its ranks end with it
    job.wait()
    time.sleep(5)
    damage(folder / f"checkpoint-{DAMAGED}" / "model.safetensors")
    subprocess.run(command, check=True)
    picture(ROOT / "docs" / "report.png", report(folder), (1120, 1376))
    swept = folder.with_name("sweep")
    shutil.rmtree(swept, ignore_errors=True)
    recipe = swept.with_suffix(".yaml")
    recipe.write_text("".join(f"{name}: {value}\n" for name, value in {**FIELDS, **SMALL}.items()))
    if train_all([str(recipe), "--output_dir", str(swept), *SWEPT]):
        return 1
    compared = report(swept)
    for name, width in WIDTHS.items():
        path = ROOT / "docs" / "screenshots" / f"report-{name}.png"
        path.parent.mkdir(exist_ok=True)
        picture(path, compared, (width, HEIGHT), dark="dark" in name)
    return 0


def report(folder: Path, *options: str) -> Path:
    """Writes the report of a run; its path."""
    command = [sys.executable, "-m", "stepmark", "report", str(folder), *options]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


def picture(path: Path, page: Path, size: tuple[int, int], *, dark: bool = False) -> None:
    """A small PNG of the page."""
    screenshot(page, path, size, dark=dark)
    Image.open(path).convert("RGB").quantize(COLORS).save(path, optimize=True)


def damage(path: Path) -> None:
    """Flips one bit of a file's last tensor."""
    with open(path, "r+b") as file:
        file.seek(-100, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-100, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


if __name__ == "__main__":
    sys.exit(main())
