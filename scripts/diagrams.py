"""Makes the diagrams of the documentation, docs/assets/diagram-*.svg: a save, a recovery, a step and a mesh.

    python scripts/diagrams.py

The save is drawn from benchmarks/results/checkpoint.csv, the recovery from docs/assets/kills.json; the others are
drawn.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "docs" / "assets"
WIDTH = 760
STYLE = """svg { font: 14px system-ui, sans-serif; --ink: #16202a; --soft: #5c6b78; --paper: #fff; --line: #c9d1d8;
--a: #0b5d67; --b: #f0b775; --kill: #c2352b; --on: #fff }
@media (prefers-color-scheme: dark) { svg { --ink: #e8eef2; --soft: #9fb0bd; --paper: #10181f; --line: #3a4853;
--a: #3c9aa0; --b: #a8672a; --kill: #ff7a6b; --on: #06171a } }
text { fill: var(--ink) } .soft { fill: var(--soft); font-size: 12px } .on { fill: var(--on); font-size: 13px }
.a { fill: var(--a) } .b { fill: var(--b) } .box { fill: none; stroke: var(--line); stroke-width: 1.5 }
.line { fill: none; stroke: var(--a); stroke-width: 2 } .under { fill: none; stroke: var(--b); stroke-width: 7 }
.kill { stroke: var(--kill); stroke-width: 2 } .killed { fill: var(--kill); font-size: 13px }"""
# Contestants of the benchmark as they are named in the picture; "raw" only writes the bytes.
SAVERS = {
    "stepmark": "Stepmark",
    "safetensors": "safetensors",
    "DCP async_save, stager": "DCP async, stager",
    "DCP async_save": "DCP async_save",
    "torch.save": "torch.save",
}


def main() -> None:
    for name, (height, about, parts) in {
        "save": save(),
        "recovery": recovery(),
        "step": step(),
        "mesh": mesh(),
    }.items():
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{about}">'
        )
        paper = f'<rect width="{WIDTH}" height="{height}" rx="10" style="fill: var(--paper)"/>'
        lines = [head, f"<style>\n{STYLE}\n</style>", paper, *parts, "</svg>", ""]
        (ASSETS / f"diagram-{name}.svg").write_text("\n".join(lines), encoding="utf-8")


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, kind: str = "box") -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4"/>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    back = -5 if x2 >= x1 else 5
    head = f"M{x2 + back:.1f} {y2 - 4:.1f}L{x2:.1f} {y2:.1f}L{x2 + back:.1f} {y2 + 4:.1f}"
    return f'<path class="line" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}{head}"/>'


def save() -> tuple[int, str, list[str]]:
    """How long training stops, and until when the disk is written, of the newest measurement of 4 GiB."""
    with open(ROOT / "benchmarks" / "results" / "checkpoint.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["setting"] == "4 GiB"]
    newest = {(row["contestant"], row["measure"]): row for row in rows}
    scale = 470 / max(float(newest[name, "durable, s"]["value"]) for name in SAVERS)
    parts = [box(170, 16, 14, 14, "a"), text(190, 28, "training waits"), box(310, 16, 14, 14, "b")]
    parts.append(text(330, 28, "written to disk behind it"))
    for index, (name, label) in enumerate(SAVERS.items()):
        stall, durable = (float(newest[name, f"{measure}, s"]["value"]) for measure in ("go on", "durable"))
        y = 46 + 34 * index
        parts += [text(160, y + 16, label, anchor="end"), box(170, y, durable * scale, 22, "b")]
        parts += [box(170, y, stall * scale, 22, "a")]
        parts.append(text(178 + durable * scale, y + 16, f"{stall:.2f} s of {durable:.2f} s", "soft"))
    date = newest["stepmark", "durable, s"]["date"]
    y = 46 + 34 * len(SAVERS) + 16
    parts.append(text(170, y, f"4 GiB, one rank, 2 x86-64 cores, no GPU, {date}, benchmarks/checkpoint.py", "soft"))
    return y + 16, "How long training waits for a save of 4 GiB, and until when it is on disk", parts


def recovery() -> tuple[int, str, list[str]]:
    """The second kill of the run in docs/assets/kills.json."""
    data = json.loads((ASSETS / "kills.json").read_text(encoding="utf-8"))
    alone = {int(at): loss for at, loss in data["alone"].items()}
    before, after = ({int(at): loss for at, loss in data["attempts"][i].items()} for i in (1, 2))
    first, last = min(before) + 10, min(after) + 40
    losses = [alone[at] for at in range(first, last + 1)]

    def x(at: float) -> float:
        return 20 + (at - first) / (last - first) * (WIDTH - 40)

    def line(curve: dict[int, float], y: float, kind: str) -> str:
        points = [(x(at), y + 90 * (max(losses) - curve[at]) / (max(losses) - min(losses))) for at in sorted(curve)]
        inside = [f"{a:.1f} {b:.1f}" for a, b in points if 20 <= a <= WIDTH - 20]
        return f'<path class="{kind}" d="M{"L".join(inside)}"/>'

    killed, resumed = max(before), min(after) - 1
    parts = [text(20, 24, "attempt 2"), line(alone, 40, "under"), line(before, 40, "line")]
    parts += [text(20, 166, "attempt 3"), line(alone, 182, "under"), line(after, 182, "line")]
    parts.append(f'<line class="kill" x1="{x(killed):.1f}" x2="{x(killed):.1f}" y1="30" y2="140"/>')
    parts.append(text(x(killed) + 8, 42, f"SIGKILL after step {killed}", "killed"))
    parts.append(arrow(x(killed), 140, x(resumed), 172))
    parts.append(text(x(resumed) - 8, 166, f"checkpoint-{resumed}", anchor="end"))
    parts.append(text(20, 300, "thick: the same run left alone. Both attempts lie on it, bit for bit.", "soft"))
    return 314, "After a kill the next attempt starts at the newest checkpoint and follows the same losses", parts


def step() -> tuple[int, str, list[str]]:
    """A step of two ranks with two micro-batches."""
    parts = []
    for rank in range(2):
        y = 40 + 78 * rank
        parts.append(text(20, y + 24, f"rank {rank}"))
        for at, words, kind in (
            (80, "micro-batch", "a"),
            (210, "micro-batch", "a"),
            (440, "clip, update", "a"),
            (600, "next step", "box"),
        ):
            parts += [
                box(at, y, 120, 38, kind),
                text(at + 60, y + 24, words, "on" if kind == "a" else "soft", "middle"),
            ]
        parts += [arrow(562, y + 19, 598, y + 19), text(80, y + 54, "forward and backward, gradients add up", "soft")]
    parts += [
        box(345, 34, 80, 128, "b"),
        text(385, 94, "reduce", anchor="middle"),
        text(385, 112, "gradients", anchor="middle"),
    ]
    parts.append(text(80, 204, "Loss, tokens and gradient norm stay on the device until they are logged.", "soft"))
    return 220, "A step: micro-batches, reduced gradients, an update", parts


def mesh() -> tuple[int, str, list[str]]:
    """Eight ranks as 2 data parallel x 2 pipeline x 2 tensor parallel."""
    parts = []
    for copy in range(2):
        left = 20 + 370 * copy
        parts += [box(left, 40, 350, 190), text(left, 28, f"data parallel {copy}: its share of the batch")]
        for stage in range(2):
            top = 56 + 84 * stage
            parts.append(text(left + 14, top + 38, f"stage {stage}", "soft"))
            for part in range(2):
                at = left + 74 + 134 * part
                rank = stage * 4 + copy * 2 + part
                parts += [box(at, top, 122, 62, "a"), text(at + 61, top + 28, f"rank {rank}", "on", "middle")]
                parts.append(text(at + 61, top + 47, f"half {part}", "on", "middle"))
    parts.append(
        text(
            20,
            256,
            "Each stage has half of the layers, each rank half of every one. A checkpoint resumes on any other mesh.",
            "soft",
        )
    )
    return 272, "Eight ranks as a mesh of three axes", parts


if __name__ == "__main__":
    main()
