"""The tables of the page: compared runs, checkpoints, events."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from stepmark.report import text
from stepmark.report.attempts import read_attempts
from stepmark.report.checkpoints import Checkpoint
from stepmark.report.colors import color
from stepmark.report.figures import total_seconds
from stepmark.report.history import KILLED, History, names
from stepmark.report.html_table import sorted_by, table
from stepmark.report.summary import number, recent_median, speed

CHECKPOINT_STATES = {
    "complete": ("good", "complete"),
    "corrupted": ("bad", "corrupted"),
    "quarantined": ("bad", "corrupted, quarantined"),
    "deleted": ("plain", "deleted"),
    "unfinished": ("warn", "unfinished"),
    "failed": ("bad", "failed"),
}
SHOWN_DELETED = 12  # deleted checkpoints; older ones are folded
EVENT_NAMES = {
    "started": "started",
    "resumed": "resumed",
    "set_aside": "checkpoint quarantined",
    "compilation": "recompiled",
    "trouble": "trouble",
    "save_failed": "save failed",
    "stopping": "stop requested",
    "restarting": "started again",
    "interrupted": "interrupted",
    "failed": "failed",
    "done": "done",
}


def run_table(histories: Sequence[History]) -> str:
    """One row per run."""
    rows = []
    metrics = {best.metric for history in histories if (best := history.best()) is not None}
    for index, (name, history) in enumerate(zip(names(histories), histories, strict=True)):
        best, last = history.best(), history.logs[-1] if history.logs else {}
        seconds = sum(total_seconds(history).values()) or None
        loss, parameters = last.get("loss"), history.started.get("parameters")
        best_cell = text.NOTHING if best is None else f"{text.value(best.value)} at step {best.step:,}"
        if best is not None and len(metrics) > 1:  # which cannot be compared
            best_cell = f"{best.metric.removeprefix('eval_')} {best_cell}"
        rows.append(
            [
                f'<i class="dot" style="background: {color(index)}"></i>{escape(name)}',
                escape(history.state),
                sorted_by(parameters, text.count(parameters)),
                sorted_by(history.last_step, _count(history.last_step)),
                sorted_by(history.target_tokens, text.count(history.target_tokens)),
                sorted_by(loss if isinstance(loss, (int, float)) else None, number(loss)),
                sorted_by(None if best is None or len(metrics) > 1 else best.value, escape(best_cell)),
                sorted_by(recent_median(history, "tokens_per_second"), speed(history, "tokens_per_second")),
                sorted_by(seconds, escape(text.seconds(seconds))),
            ]
        )
    heads = ["Run", "State", "#Parameters", "#Step", "#Tokens", "#Loss", "#Best evaluation", "#Tokens per second"]
    return f"<h2>Runs</h2>{table('runs', [*heads, '#Time'], rows, sortable=True)}"


def checkpoint_table(history: History, checkpoints: Sequence[Checkpoint]) -> str:
    """Every checkpoint the run saved, with its size, timing and state."""
    if not checkpoints:
        return '<h2>Checkpoints</h2><p class="soft">No checkpoints.</p>'
    gone = [one for one in checkpoints if one.state == "deleted"][:-SHOWN_DELETED]
    heads = ["#Step", "State", "", "#Size", "#Stall", "#Durable after", "#Saved"]
    shown = table("checkpoints", heads, _checkpoint_rows(history, [one for one in checkpoints if one not in gone]))
    older = ""
    if gone:
        inner = table("deleted", heads, _checkpoint_rows(history, gone))
        older = f"<details><summary>{len(gone):,} older deleted checkpoints</summary>{inner}</details>"
    note = (
        '<p class="soft small">Complete: every file has the right size, and headers and small files match their '
        "checksums; <code>stepmark verify</code> checks every byte.</p>"
    )
    return f"<h2>Checkpoints</h2>{shown}{note}{older}"


def _checkpoint_rows(history: History, checkpoints: Sequence[Checkpoint]) -> list[list[str]]:
    best = history.best()
    rows = []
    for one in checkpoints:
        kind, word = CHECKPOINT_STATES[one.state]
        notes = [one.detail] if one.detail else []
        if one.restored:
            notes.append("verified: resumed from, every checksum matched")
        if best is not None and best.step == one.step and one.state in ("complete", "deleted"):
            notes.append(f"best {best.metric}")
        rows.append(
            [
                f'<span data-checkpoint="{escape(one.name)}" data-state="{one.state}">{one.step:,}</span>',
                f'<span class="pill {kind}">{word}</span>',
                escape("; ".join(notes)),
                text.size(one.size),
                escape(text.seconds(one.stall)),
                escape(text.seconds(one.durable)),
                text.moment(one.time),
            ]
        )
    return rows


def event_table(history: History) -> str:
    """The run's events in order of time."""
    rows: list[tuple[float, object, str, str]] = []
    for event in history.events:
        if event["event"] in EVENT_NAMES and not (event["event"] == "started" and event.get("step")):  # as "resumed"
            detail = event.get("message") or event.get("reason") or event.get("checkpoint") or ""
            rows.append((event.get("time") or 0.0, event.get("step"), EVENT_NAMES[event["event"]], str(detail)))
    for before, after in history.resumptions():
        if before.ended == KILLED and before.last_time is not None:
            detail = f"last log of this process; the run {after.origin}"
            rows.append((before.last_time, before.last, KILLED, detail))
    if not rows:
        return ""
    cells = [
        [f'<span class="when">{escape(text.moment(time))}</span>', _count(step), escape(kind), escape(detail)]
        for time, step, kind, detail in sorted(rows, key=lambda row: row[0])
    ]
    return f"<h2>Events</h2>{table('events', ['Time', '#Step', 'Event', ''], cells)}"


def attempt_table(history: History) -> str:
    """A row for each start of the run's ranks; nothing for a run that was started once."""
    attempts = read_attempts(history)
    if len(attempts) < 2:
        return ""
    rows = [
        [
            f"{index}",
            f'<span class="when">{escape(text.moment(one.began))}</span>' if one.began is not None else text.NOTHING,
            _count(one.ranks),
            _count(one.first),
            _count(one.last),
            escape(one.ended or "running"),
        ]
        for index, one in enumerate(attempts, start=1)
    ]
    return f"<h2>Attempts</h2>{table('attempts', ['#Attempt', 'Began', '#Ranks', '#From', '#To', ''], rows)}"


def _count(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else text.NOTHING
