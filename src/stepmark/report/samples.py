"""What the model wrote at each evaluation (`sample_prompts`)."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from stepmark.report.history import History, names
from stepmark.report.html_table import table

SHOWN = 3  # evaluations; earlier ones are folded


def sample_table(histories: Sequence[History]) -> str:
    """The newest texts of all runs, and the earlier ones folded; nothing if there are none."""
    rows = [
        (step, name, prompt, written)
        for name, history in zip(names(histories), histories, strict=True)
        for step, prompt, written in _samples(history)
    ]
    if not rows:
        return ""
    rows.sort(key=lambda row: -row[0])
    recent = sorted({row[0] for row in rows})[-SHOWN:]
    several = len(histories) > 1
    newest = _table("samples", [row for row in rows if row[0] in recent], several)
    earlier = [row for row in rows if row[0] not in recent]
    folded = ""
    if earlier:
        inner = _table("earlier-samples", earlier, several)
        folded = f"<details><summary>{len(earlier):,} earlier samples</summary>{inner}</details>"
    return f'<section id="written"><h2>Samples</h2>{newest}{folded}</section>'


def _samples(history: History) -> list[tuple[int, str, str]]:
    """Step, prompt and continuation; of a step that was evaluated again after a resumption, the last."""
    found = {}
    for event in history.of_kind("sample"):
        step, prompt, written = (event.get(name) for name in ("step", "prompt", "text"))
        if isinstance(step, int):
            found[step, str(prompt)] = str(written)
    return [(step, prompt, written) for (step, prompt), written in found.items()]


def _table(name: str, rows: Sequence[tuple[int, str, str, str]], several: bool) -> str:
    cells = [
        [
            f"{step:,}",
            *([escape(run)] if several else []),
            f'<span class="sample"><b>{escape(prompt)}</b>{escape(written)}</span>',
        ]
        for step, run, prompt, written in rows
    ]
    return table(name, ["#Step", *(["Run"] if several else []), "Text"], cells)
