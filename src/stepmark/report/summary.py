"""The top of the page: how the run is, what is wrong with it, and a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from stepmark.report import text
from stepmark.report.checkpoints import Checkpoint
from stepmark.report.history import History

STATES = {"done": "good", "running": "plain", "interrupted": "warn", "failed": "bad"}
DAMAGED = {"damaged": "is damaged", "aside": "was damaged, and is set aside"}
RECENT = 20  # logs that a speed is the median of


def header(history: History) -> str:
    """The run's name, its state, how far it is, and on what it ran."""
    state = str(history.status.get("state") or "unknown")
    step, total = history.last_step, history.started.get("total_steps")
    told = ["no step logged yet" if step is None else f"step {step:,}" + (f" of {total:,}" if total else "")]
    started = history.started
    if started.get("device"):
        told.append(
            f"{text.plural(started.get('ranks', 1), 'rank')} on {started.get('device_model') or started['device']}"
        )
    if history.last_word is not None:
        told.append(f"last heard of {text.moment(history.last_word)}")
    reason = history.status.get("reason")
    note = f'<p class="soft">{escape(str(reason))}</p>' if reason else ""
    line = f'<span class="pill {STATES.get(state, "plain")}" id="state">{escape(state)}</span>' + "".join(
        f'<span class="soft">{escape(part)}</span>' for part in told
    )
    return f'<header><h1>{escape(history.name)}</h1><div class="line">{line}</div>{note}</header>'


def trouble(history: History, checkpoints: Sequence[Checkpoint]) -> str:
    """Everything that is wrong, once each; a calm line where nothing is."""
    told = [(str(event.get("kind", "trouble")), str(event.get("message", ""))) for event in history.of_kind("trouble")]
    told += [
        ("save_failed", f"the save of step {event.get('step')} failed") for event in history.of_kind("save_failed")
    ]
    told += [
        ("damaged", f"checkpoint-{one.step} {DAMAGED[one.state]}: {one.detail}")
        for one in checkpoints
        if one.state in DAMAGED
    ]
    told += [
        ("evaluation", f"checkpoint-{line.get('step')} was not evaluated: {line.get('reason', 'it failed')}")
        for line in history.unevaluated
    ]
    items = "".join(f'<li data-kind="{escape(kind)}">{escape(said)}</li>' for kind, said in dict.fromkeys(told))
    if not items:
        return '<p class="calm soft small">No sign of trouble.</p>'
    return f'<section class="trouble" id="trouble"><h2>Trouble</h2><ul>{items}</ul></section>'


def tiles(history: History, checkpoints: Sequence[Checkpoint]) -> str:
    """A few numbers, each with a name and a word on where it is from."""
    found: list[tuple[str, str, str]] = []
    if history.logs:
        last = history.logs[-1]
        found.append(("Training loss", number(last.get("loss")), f"step {last['step']:,}"))
    best = history.best()
    if best is not None:
        name = best.metric.removeprefix("eval_").replace("_", " ")
        found.append((f"Best evaluation {name}", text.value(best.value), f"step {best.step:,}"))
    found += _speed(history)
    whole = [one.step for one in checkpoints if one.state == "whole"]
    if checkpoints:
        found.append(("Checkpoints", f"{len(whole)}", f"newest: step {max(whole):,}" if whole else "none is whole"))
    resumed = len(history.attempts) - 1
    if resumed > 0:
        again = sum(max((before.last or 0) - (after.resumed or 0), 0) for before, after in history.resumptions())
        found.append(("Resumed", "once" if resumed == 1 else f"{resumed} times", f"{text.plural(again, 'step')} again"))
    return f'<section class="tiles">{"".join(_tile(*one) for one in found)}</section>' if found else ""


def number(value: Any) -> str:
    """A logged value."""
    return text.value(value) if isinstance(value, (int, float)) else text.NOTHING


def _speed(history: History) -> list[tuple[str, str, str]]:
    recent = history.logs[-RECENT:]
    found = []
    for key, name, form in (
        ("tokens_per_second", "Tokens per second", "{:,.0f}"),
        ("model_flops_utilization", "FLOPs utilization", "{:.1%}"),
    ):
        values = sorted(line[key] for line in recent if isinstance(line.get(key), (int, float)))
        if values:
            note = f"median of {text.plural(len(values), 'log')}"
            found.append((name, form.format(values[len(values) // 2]), note))
    return found


def _tile(name: str, value: str, note: str) -> str:
    return (
        f'<div class="tile"><div class="name">{escape(name)}</div><div class="value">{escape(value)}</div>'
        f'<div class="note">{escape(note)}</div></div>'
    )
