"""The tables of the page: compared runs, their configuration, samples, checkpoints, events, attempts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

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
from stepmark.report.summary import STATES, recent_median
from stepmark.report.templates import asset, color, words

SHOWN_FIELDS = 8  # in which runs differ, as columns of their table
FEW = 4  # runs that also have a table with a row for each field
SHOWN_DELETED = 12  # deleted checkpoints; older ones are folded


PILL, CODE = Markup('<span class="pill {}">{}</span>'), Markup("<code>{}</code>")
WHEN, STEP = Markup('<span class="when">{}</span>'), Markup('<span data-checkpoint="{}" data-state="{}">{}</span>')
SAMPLE = Markup('<span class="sample"><b>{}</b>{}</span>')


class Table(NamedTuple):
    """A head that starts with # is a column of numbers, an empty one a column of details. Where a table can be sorted,
    a cell of a column of numbers is the number, None for the end, and what is shown."""

    name: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Any]]

    @staticmethod
    def kind(head: str) -> str:
        return "number" if head.startswith("#") else "" if head else "detail"


def run_table(histories: Sequence[History], colors: Sequence[int]) -> Table:
    """One row per run, with the fields in which they differ."""
    fields = dict(list(differences(histories).items())[:SHOWN_FIELDS])
    rows = []
    metrics = {best.metric for history in histories if (best := history.best()) is not None}
    every = zip(short_names(histories), names(histories), histories, strict=True)
    for index, (short, name, history) in enumerate(every):
        best, last = history.best(), history.logs[-1] if history.logs else {}
        seconds = sum(total_seconds(history).values()) or None
        loss, parameters = last.get("loss"), history.started.get("parameters")
        speed = recent_median(history, "tokens_per_second")
        best_cell = text.NOTHING if best is None else f"{text.value(best.value)} at step {best.step:,}"
        if best is not None and len(metrics) > 1:  # which cannot be compared
            best_cell = f"{best.metric.removeprefix('eval_')} {best_cell}"
        marked = PILL.format("good", "best") + " " if index == best_of(histories) else Markup()
        run = Markup(asset("run.html").strip())
        rows.append(
            [
                run.format(name=name, color=color(colors[index]), index=index, short=short),
                PILL.format(STATES.get(history.state, "plain"), history.state),
                (None if best is None or len(metrics) > 1 else best.value, marked + best_cell),
                (_as_number(loss), text.value(loss)),
                *((_as_number(values[index]), values[index]) for values in fields.values()),
                (history.last_step, _count(history.last_step)),
                (history.target_tokens, text.count(history.target_tokens)),
                (speed, text.NOTHING if speed is None else f"{speed:,.0f}"),
                (parameters, text.count(parameters)),
                (seconds, text.seconds(seconds)),
            ]
        )
    heads = ["Run", "State", "#Best evaluation", "#Loss", *(f"#{field}" for field in fields)]
    return Table("runs", [*heads, "#Step", "#Tokens", "#Tokens per second", "#Parameters", "#Time"], rows)


def _as_number(value: object) -> float | None:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def checkpoint_tables(history: History, checkpoints: Sequence[Checkpoint]) -> tuple[Table, Table]:
    """Every checkpoint the run saved, with its size, timing and state; and older ones that were deleted."""
    gone = [one for one in checkpoints if one.state == "deleted"][:-SHOWN_DELETED]
    hidden = set(map(id, gone))  # of maybe ten thousands
    heads = ["#Step", "State", "", "#Size", "#Stall", "#Durable after", "#Saved"]
    shown = _checkpoint_rows(history, [one for one in checkpoints if id(one) not in hidden])
    return Table("checkpoints", heads, shown), Table("deleted", heads, _checkpoint_rows(history, gone))


def _checkpoint_rows(history: History, checkpoints: Sequence[Checkpoint]) -> list[list[str]]:
    best = history.best()
    rows = []
    for one in checkpoints:
        notes = [one.detail] if one.detail else []
        if one.restored:
            notes.append("verified: resumed from, every checksum matched")
        if best is not None and best.step == one.step and one.state in ("complete", "deleted"):
            notes.append(f"best {best.metric}")
        rows.append(
            [
                STEP.format(one.name, one.state, f"{one.step:,}"),
                PILL.format(*words("checkpoint")[one.state]),
                "; ".join(notes),
                text.size(one.size),
                text.seconds(one.stall),
                text.seconds(one.durable),
                text.moment(one.time),
            ]
        )
    return rows


def event_table(history: History) -> Table:
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
    rows.sort(key=lambda row: row[0])
    cells = [[WHEN.format(text.moment(time)), _count(step), kind, detail] for time, step, kind, detail in rows]
    return Table("events", ["Time", "#Step", "Event", ""], cells)


def attempt_table(history: History) -> Table:
    """A row for each start of the run's ranks; none for a run that was started once."""
    attempts = read_attempts(history)
    rows = [
        [
            f"{index}",
            WHEN.format(text.moment(one.began)) if one.began is not None else text.NOTHING,
            *map(_count, (one.ranks, one.first, one.last)),
            one.ended or "running",
        ]
        for index, one in enumerate(attempts, start=1)
    ]
    heads = ["#Attempt", "Began", "#Ranks", "#From", "#To", ""]
    return Table("attempts", heads, rows if len(attempts) > 1 else [])


def _count(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else text.NOTHING


SHOWN = 3  # evaluations, of several runs the last; earlier ones are folded


def sample_tables(histories: Sequence[History]) -> tuple[Table, Table]:
    """The newest texts of all runs, and the earlier ones."""
    several = len(histories) > 1
    rows = [
        (step, [f"{step:,}", *([name] if several else []), SAMPLE.format(prompt, written)])
        for name, history in zip(short_names(histories), histories, strict=True)
        for step, prompt, written in _samples(history)
    ]
    rows.sort(key=lambda row: -row[0])
    recent = sorted({step for step, _ in rows})[-1 if several else -SHOWN :]
    heads = ["#Step", *(["Run"] if several else []), "Text"]
    newest, earlier = ([row for step, row in rows if (step in recent) == new] for new in (True, False))
    return Table("samples", heads, newest), Table("earlier-samples", heads, earlier)


def _samples(history: History) -> list[tuple[int, str, str]]:
    """Step, prompt and continuation; of a step that was evaluated again after a resumption, the last."""
    found = {}
    for event in history.of_kind("sample"):
        step, prompt, written = (event.get(name) for name in ("step", "prompt", "shown"))
        if isinstance(step, int):
            found[step, str(prompt)] = str(written if written is not None else event.get("text"))
    return [(step, prompt, written) for (step, prompt), written in found.items()]


OF_THE_FOLDER = ("output_dir", "run_name", "resume_from_checkpoint")  # differ between runs and say nothing about them
FACTS = ("ranks", "mesh", "device", "device_model")  # of the event "started"


def read_configuration(history: History) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields or arguments that a run was given, and its defaults for others; both empty if it recorded none."""
    fields = all_fields()
    try:
        given = parse_yaml(read_file(history.folder / USED_RECIPE).decode())
    except (OSError, ValueError):
        given, fields = history.started.get("arguments"), fields_of(TrainingFields)
    if not isinstance(given, dict) or not given:
        return {}, {}
    return given, {name: field.default for name, field in fields.items()}


def differences(histories: Sequence[History]) -> dict[str, list[str]]:
    """The values in all runs of fields and facts that differ between those that have them, or that one alone has."""
    every = [(_facts(history), *read_configuration(history)) for history in histories]
    known = [{**defaults, **facts, **given} for facts, given, defaults in every]
    found = {}
    for name in dict.fromkeys(name for facts, given, _ in every for name in (*facts, *given)):
        values = [_shown(each[name]) for each in known if name in each]
        if name not in OF_THE_FOLDER and (len(set(values)) > 1 or len(values) == 1 < len(known)):
            found[name] = [_shown(each.get(name)) for each in known]
    return found


def difference_table(histories: Sequence[History], found: Mapping[str, list[str]]) -> Table:
    """One row for each of the `differences`, unless the table of runs shows them all."""
    shown = {} if len(histories) > FEW and len(found) <= SHOWN_FIELDS else found
    rows = [[CODE.format(name), *map(CODE.format, values)] for name, values in shown.items()]
    return Table("differences", ["Field", *short_names(histories)], rows)


def configuration_table(history: History) -> Table:
    """What a run was given."""
    given, _ = read_configuration(history)
    rows = [[CODE.format(name), CODE.format(_shown(value))] for name, value in given.items()]
    return Table("configuration", ["Field", "Value"], rows)


def _facts(history: History) -> dict[str, Any]:
    """Where the run trained; names of software as `software torch`."""
    started = history.started
    versions = (started.get("software") or {}).items()
    facts = {name: started[name] for name in FACTS if name in started}
    return {**facts, **{f"software {name}": version for name, version in versions}}


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    return text.NOTHING if value is None else json.dumps(value, default=str)
