"""Makes docs/assets/kills.svg: the loss of a run that is killed five times, over that of the same run left alone.

    python scripts/kills_picture.py [replicas] [FOLDER]

Trains a tiny GPT-2 on bytes of the standard library twice, on a CPU, in FOLDER (default: a temporary one). The second
run gets SIGKILL five times and is started again with the same command. The data are kept in docs/assets/kills.json;
`--draw` only draws them again. Fails unless all losses and the final model are the same, bit for bit.

`replicas` makes docs/assets/replicas.svg instead: of 8 processes, and of 8, 5, 2 and again 8 after each SIGKILL.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "docs" / "assets"
STEPS, SAVE_EVERY = 240, 20
FIELDS = {
    "device": "cpu",
    "config_name": "gpt2",
    "config_overrides": "{n_layer: 1, n_embd: 32, n_head: 2, n_positions: 32}",
    "tokenizer_name": "bytes",
    "dataset_name": "python-stdlib",
    "block_size": 32,
    "max_train_samples": 2000,
    "max_steps": STEPS,
    "per_device_train_batch_size": 8,
    "learning_rate": "1e-2",
    "warmup_steps": 20,
    "logging_steps": 1,
    "save_steps": SAVE_EVERY,
    "save_total_limit": 2,
    "resume_from_checkpoint": "true",
    "disable_tqdm": "true",
    "report_to": "none",
}


@dataclass(frozen=True)
class Picture:
    """`kills`: after which logged steps a SIGKILL follows. `processes`: those of each attempt, the first one's also of
    the run that is left alone; none: a single one without `--nproc`."""

    name: str
    title: str
    alt: str
    kills: tuple[int, ...]
    processes: tuple[int, ...] = ()


PICTURES = {
    "kills": Picture(
        "kills",
        "Killed five times. The same curve, the same model.",
        "The losses of a run that was killed five times lie on those of the same run left alone",
        (33, 74, 115, 158, 211),
    ),
    "replicas": Picture(
        "replicas",
        "8 processes, then 5, 2 and 8. The same curve, the same model.",
        "The losses of a run on 8, 5, 2 and 8 processes lie on those of the same run on 8",
        (58, 121, 177),
        (8, 5, 2, 8),
    ),
}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 880, 380, 52, 20, 78, 62


def main() -> int:
    given = [each for each in sys.argv[1:] if each != "--draw"]
    picture = PICTURES[given.pop(0)] if given and given[0] in PICTURES else PICTURES["kills"]
    data = ASSETS / f"{picture.name}.json"
    if "--draw" not in sys.argv:
        with tempfile.TemporaryDirectory() as temporary:
            write(data, measure(picture, Path(given[0] if given else temporary)))
    (ASSETS / f"{picture.name}.svg").write_text(drawn(picture, json.loads(data.read_text())))
    return 0


def measure(picture: Picture, folder: Path) -> dict[str, Any]:
    """Trains both runs; the losses of the undisturbed one and of each attempt of the other, and their checksums."""
    alone, killed = folder / "alone", folder / "killed"
    subprocess.run(command(alone, *picture.processes[:1]), check=True)
    attempts: list[dict[int, float]] = []
    for number, after in enumerate((*picture.kills, STEPS)):
        seen = len(lines(killed))
        job = subprocess.Popen(command(killed, *picture.processes[number : number + 1]))
        while job.poll() is None and (after == STEPS or not any(step >= after for step in losses(killed, seen))):
            time.sleep(0.01)
        if after != STEPS:
            os.kill(job.pid, signal.SIGKILL)
        code = job.wait()
        if code != (0 if after == STEPS else -signal.SIGKILL):
            raise SystemExit(f"attempt {len(attempts) + 1} ended with {code}")
        attempts.append(losses(killed, seen))
    expected = losses(alone)
    for attempt in attempts:
        if different := [step for step, loss in attempt.items() if loss != expected[step]]:
            raise SystemExit(f"losses differ at steps {different}")
    sums = [hashlib.sha256((each / "model.safetensors").read_bytes()).hexdigest() for each in (alone, killed)]
    if sums[0] != sums[1]:
        raise SystemExit("the final models differ")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip(),
        "sha256": sums[0],
        "alone": expected,
        "attempts": attempts,
    }


def command(folder: Path, nproc: int | None = None) -> list[str]:
    fields = FIELDS if nproc is None else {**FIELDS, "per_device_train_batch_size": 1, "nproc": nproc}
    flags = [part for name, value in fields.items() for part in (f"--{name}", str(value))]
    return [sys.executable, "-m", "stepmark", "train", "--output_dir", str(folder), *flags]


def lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def losses(folder: Path, start: int = 0) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines(folder)[start:] if "loss" in line}


def write(path: Path, data: dict[str, Any]) -> None:
    ASSETS.mkdir(exist_ok=True)
    rows = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in data.items() if name != "attempts"]
    attempts = ",\n".join(json.dumps(each) for each in data["attempts"])
    path.write_text("{\n" + ",\n".join(rows) + ',\n"attempts": [\n' + attempts + "\n]\n}\n")


def drawn(picture: Picture, data: dict[str, Any]) -> str:
    """The picture as SVG, in light and dark colours as the reader's system asks for."""
    alone = {int(step): loss for step, loss in data["alone"].items()}
    attempts = [{int(step): loss for step, loss in each.items()} for each in data["attempts"]]
    low, high = 2.0, 6.0

    def x(step: float) -> float:
        return LEFT + step / STEPS * (WIDTH - LEFT - RIGHT)

    def y(loss: float) -> float:
        return TOP + (high - loss) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def path(curve: dict[int, float], kind: str) -> str:
        points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in sorted(curve.items()))
        return f'<polyline class="{kind}" points="{points}"/>'

    parts = [f'<text class="title" x="{LEFT}" y="30">{picture.title}</text>']
    parts += [
        f'<line class="thick" x1="{LEFT}" x2="{LEFT + 26}" y1="52" y2="52"/>'
        f'<text x="{LEFT + 34}" y="56">left alone</text>',
        f'<line class="thin" x1="{LEFT + 150}" x2="{LEFT + 176}" y1="52" y2="52"/>'
        f'<text x="{LEFT + 184}" y="56">killed and resumed</text>',
        f'<line class="kill" x1="{LEFT + 400}" x2="{LEFT + 400}" y1="44" y2="60"/>'
        f'<text x="{LEFT + 408}" y="56">SIGKILL</text>',
        f'<rect class="again" x="{LEFT + 520}" y="44" width="16" height="16"/>'
        f'<text x="{LEFT + 544}" y="56">steps trained again</text>',
    ]
    for loss in range(2, int(high) + 1):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(loss):.1f}" y2="{y(loss):.1f}"/>')
        parts.append(f'<text class="small" text-anchor="end" x="{LEFT - 8}" y="{y(loss) + 4:.1f}">{loss}</text>')
    for step in range(0, STEPS + 1, 40):
        parts.append(f'<text class="small" text-anchor="middle" x="{x(step):.1f}" y="{y(low) + 18:.1f}">{step}</text>')
    for before, after in pairwise(attempts):
        left, right = x(min(after) - 1), x(max(before))
        box = f'x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{HEIGHT - TOP - BOTTOM}"'
        parts.append(f'<rect class="again" {box}/>')
        parts.append(f'<line class="kill" x1="{right:.1f}" x2="{right:.1f}" y1="{TOP}" y2="{y(low):.1f}"/>')
    begins = [0, *(max(attempt) for attempt in attempts[:-1])]
    for number, begin in zip(picture.processes, begins, strict=bool(picture.processes)):
        parts.append(f'<text class="small" x="{x(begin) + 6:.1f}" y="{TOP + 14}">{number} processes</text>')
    parts.append(path(alone, "thick"))
    parts += [path(each, "thin") for each in attempts]
    same = f"SHA-256 of both models: {data['sha256'][:16]}…"
    parts.append(f'<text class="small" x="{LEFT}" y="{HEIGHT - 14}">{same}</text>')
    about = f"GPT-2 on bytes, CPU, loss in nats by step; {data['date']}, {data['commit']}"
    parts.append(f'<text class="small about" text-anchor="end" x="{WIDTH - RIGHT}" y="{HEIGHT - 14}">{about}</text>')
    return SVG.format(width=WIDTH, height=HEIGHT, alt=picture.alt, parts="\n".join(parts))


SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" \
aria-label="{alt}">
<style>
svg {{ font: 14px system-ui, sans-serif; --ink: #16202a; --soft: #5c6b78; --paper: #fff; --grid: #e4e8ec; \
--thick: #f0b775; --thin: #0b5d67; --kill: #c2352b }}
@media (prefers-color-scheme: dark) {{ svg {{ --ink: #e8eef2; --soft: #9fb0bd; --paper: #10181f; --grid: #26323c; \
--thick: #a8672a; --thin: #5fd0cf; --kill: #ff7a6b }} }}
text {{ fill: var(--ink) }} .small {{ fill: var(--soft); font-size: 12px }}
.title {{ font-size: 19px; font-weight: 700 }}
polyline, line {{ fill: none; stroke-linejoin: round }} .grid {{ stroke: var(--grid) }} .kill {{ stroke: var(--kill); \
stroke-width: 1.5 }}
.thick {{ stroke: var(--thick); stroke-width: 7; stroke-linecap: round }}
.thin {{ stroke: var(--thin); stroke-width: 1.5 }}
.again {{ fill: var(--kill); opacity: .12 }}
@media (max-width: 520px) {{ svg {{ font-size: 20px }} .small {{ font-size: 20px }} .about {{ display: none }}
.title {{ font-size: 26px }} }}
</style>
<rect width="{width}" height="{height}" rx="10" style="fill: var(--paper)"/>
{parts}
</svg>
"""


if __name__ == "__main__":
    sys.exit(main())
