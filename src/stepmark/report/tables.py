"""The tables of the page: compared runs, their configuration, samples, checkpoints, events, attempts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from stepmark.config.fields import fields_of
from stepmark.config.recipe import all_fields
from stepmark.config.training_fields import TrainingFields
from stepmark.config.yaml_file import parse_yaml
from stepmark.filesystem.files import read_file
from stepmark.recipe.used_recipe import USED_RECIPE
from stepmark.report import text
from stepmark.report.checkpoints import Checkpoint
from stepmark.report.figures import total_seconds
from stepmark.report.history import KILLED, History, best_of, names, read_attempts, short_names
from stepmark.report.html_table import asset, color, fragment, sorted_by, table, words
from stepmark.report.summary import STATES, recent_median, speed

SHOWN_FIELDS = 8  # in which runs differ, as columns of their table
FEW = 4  # runs that also have a table with a row for each field
SHOWN_DELETED = 12  # deleted checkpoints; older ones are folded


def run_table(histories: Sequence[History], colors: Sequence[int]) -> str:
    """One row per run, with the fields in which they differ; the controls that show and hide runs and group them."""
    fields = dict(list(differences(histories).items())[:SHOWN_FIELDS])
    rows = []
    metrics = {best.metric for history in histories if (best := history.best()) is not None}
    every = zip(short_names(histories), names(histories), histories, strict=True)
    for index, (short, name, history) in enumerate(every):
        best, last = history.best(), history.logs[-1] if history.logs else {}
        seconds = sum(total_seconds(history).values()) or None
        loss, parameters = last.get("loss"), history.started.get("parameters")
        best_cell = text.NOTHING if best is None else f"{text.value(best.value)} at step {best.step:,}"
        if best is not None and len(metrics) > 1:  # which cannot be compared
            best_cell = f"{best.metric.removeprefix('eval_')} {best_cell}"
        marked = '<span class="pill good">best</span> ' * (index == best_of(histories))
        rows.append(
            [
                fragment("run", name=escape(name), color=color(colors[index]), index=index, short=escape(short)),
                f'<span class="pill {STATES.get(history.state, "plain")}">{escape(history.state)}</span>',
                sorted_by(None if best is None or len(metrics) > 1 else best.value, marked + escape(best_cell)),
                sorted_by(loss if isinstance(loss, (int, float)) else None, text.value(loss)),
                *(sorted_by(_as_number(values[index]), escape(values[index])) for values in fields.values()),
                sorted_by(history.last_step, _count(history.last_step)),
                sorted_by(history.target_tokens, text.count(history.target_tokens)),
                sorted_by(recent_median(history, "tokens_per_second"), speed(history, "tokens_per_second")),
                sorted_by(parameters, text.count(parameters)),
                sorted_by(seconds, escape(text.seconds(seconds))),
            ]
        )
    heads = ["Run", "State", "#Best evaluation", "#Loss", *(f"#{field}" for field in fields)]
    heads += ["#Step", "#Tokens", "#Tokens per second", "#Parameters", "#Time"]
    return f"{asset('runs.html')}{table('runs', heads, rows, sortable=True)}"


def _as_number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


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
        color_of_state, word = words("checkpoint")[one.state]
        notes = [one.detail] if one.detail else []
        if one.restored:
            notes.append("verified: resumed from, every checksum matched")
        if best is not None and best.step == one.step and one.state in ("complete", "deleted"):
            notes.append(f"best {best.metric}")
        rows.append(
            [
                f'<span data-checkpoint="{escape(one.name)}" data-state="{one.state}">{one.step:,}</span>',
                f'<span class="pill {color_of_state}">{word}</span>',
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
    shown = words("event")
    for event in history.events:
        _, name = shown.get(event["event"], ("", ""))
        if name and not (event["event"] == "started" and event.get("step")):  # as "resumed"
            detail = event.get("message") or event.get("reason") or event.get("checkpoint") or ""
            rows.append((event.get("time") or 0.0, event.get("step"), name, str(detail)))
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


SHOWN = 3  # evaluations, of several runs the last; earlier ones are folded


def sample_table(histories: Sequence[History]) -> str:
    """The newest texts of all runs, and the earlier ones folded; nothing if there are none."""
    rows = [
        (step, name, prompt, written)
        for name, history in zip(short_names(histories), histories, strict=True)
        for step, prompt, written in _samples(history)
    ]
    if not rows:
        return ""
    rows.sort(key=lambda row: -row[0])
    recent = sorted({row[0] for row in rows})[-SHOWN if len(histories) == 1 else -1 :]
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
        step, prompt, written = (event.get(name) for name in ("step", "prompt", "shown"))
        if isinstance(step, int):
            found[step, str(prompt)] = str(written if written is not None else event.get("text"))
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


OF_THE_FOLDER = ("output_dir", "run_name", "resume_from_checkpoint")  # differ between runs and say nothing about them
FACTS = ("ranks", "mesh", "device", "device_model", "software")  # of the event "started"


def read_configuration(history: History) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a run was given, a recipe's fields or a script's arguments, and the defaults that it had besides; both empty
    if it has recorded neither."""
    fields = all_fields()
    try:
        given = parse_yaml(read_file(history.folder / USED_RECIPE).decode())
    except (OSError, ValueError):
        given, fields = history.started.get("arguments"), fields_of(TrainingFields)
    if not isinstance(given, dict) or not given:
        return {}, {}
    return given, {name: field.default for name, field in fields.items()}


def differences(histories: Sequence[History]) -> dict[str, list[str]]:
    """The values in all runs of each field or fact that is not the same in all that have recorded it, or that one run
    alone has recorded."""
    every = [(_facts(history), *read_configuration(history)) for history in histories]
    known = [{**defaults, **facts, **given} for facts, given, defaults in every]
    found = {}
    for name in dict.fromkeys(name for facts, given, _ in every for name in (*facts, *given)):
        values = [_shown(each[name]) for each in known if name in each]
        if name not in OF_THE_FOLDER and (len(set(values)) > 1 or len(values) == 1 < len(known)):
            found[name] = [_shown(each.get(name)) for each in known]
    return found


def configuration_table(histories: Sequence[History]) -> str:
    """One run: what it was given, folded. Several: one row for each field or fact that is not the same in all,
    unless the table of runs shows them all."""
    if len(histories) == 1:
        return _of_one(histories[0])
    found = differences(histories)
    if not found:
        return '<h2>Differences</h2><p class="soft">All recorded settings of these runs are the same.</p>'
    if len(histories) > FEW and len(found) <= SHOWN_FIELDS:
        return ""
    rows = [
        [f"<code>{escape(name)}</code>", *(f"<code>{escape(value)}</code>" for value in values)]
        for name, values in found.items()
    ]
    return f"<h2>Differences</h2>{table('differences', ['Field', *short_names(histories)], rows)}"


def _of_one(history: History) -> str:
    given, _ = read_configuration(history)
    if not given:
        return ""
    rows = [[f"<code>{escape(name)}</code>", f"<code>{escape(_shown(value))}</code>"] for name, value in given.items()]
    inner = table("configuration", ["Field", "Value"], rows)
    source = "of its recipe" if (history.folder / USED_RECIPE).is_file() else "of its arguments"
    return f"<details><summary>Configuration: {text.plural(len(rows), 'field')} {source}</summary>{inner}</details>"


def _facts(history: History) -> dict[str, Any]:
    """Where the run trained; names of software as `software torch`."""
    started = history.started
    found = {name: started[name] for name in FACTS if name in started}
    software = found.pop("software", None)
    versions = software if isinstance(software, dict) else {}
    return {**found, **{f"software {name}": version for name, version in versions.items()}}


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    return text.NOTHING if value is None else json.dumps(value, default=str)
