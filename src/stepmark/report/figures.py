"""The figures of a report as plain data, which the page's script draws."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from pathlib import Path

from stepmark.filesystem.files import files_in
from stepmark.filesystem.json_files import finite_number, read_lines
from stepmark.report.history import Attempt, EvaluationPoint, History, Line
from stepmark.trainer.run_folder.run_log import SYSTEM

POINTS = 1500  # of one line, at most
BARS = 48
TRAINING = ("step", "data")
PARTS = {part: f"seconds_{part}" for part in (*TRAINING, "save", "evaluation")}
GIGA, MEGA = 1e9, 1e6
RANKS = 8  # of one run whose machines are shown, at most
AXES = ("tokens", "epoch", "flops")  # that a curve can be drawn over, beside steps and time
PLACES = 200  # at most, at which a run's position on these axes is given


@dataclass(frozen=True)
class Series:
    """A line, points, or one part of stacked bars. `x`: steps; `times`: seconds since the run began; `y`: values, None
    at a gap. `kind`: line, lost (steps that were trained again), points, bar. `run`: index of the run on the page;
    `best`: index of the best point; `hollow`: evaluated by `stepmark evaluate`; `mean`: of a thinned line, the mean of
    the values that each kept one represents."""

    name: str
    kind: str
    run: int
    x: list[float]
    y: list[float | None]
    times: list[float | None]
    best: int | None = None
    hollow: bool = False
    mean: list[float | None] | None = None


@dataclass(frozen=True)
class Mark:
    """An event at a step: resumed, compilation, trouble; or lost, which spans the steps up to `until` that were trained
    again. Times are in seconds since the run began."""

    kind: str
    run: int
    step: float
    time: float | None
    label: str
    until: float | None = None
    until_time: float | None = None


@dataclass
class Figure:
    """One chart. `log`: the values span orders of magnitude; `zero`: the axis starts at 0; `smooth`: lines are noisy
    and drawn with a moving mean; `percent`: values are fractions of 1."""

    name: str
    title: str
    unit: str
    series: list[Series] = field(default_factory=list)
    log: bool = False
    zero: bool = False
    smooth: bool = False
    percent: bool = False


CURVES = {  # by the field of metrics.jsonl
    "grad_norm": Figure("grad_norm", "Gradient norm", "before clipping", smooth=True),
    "learning_rate": Figure("learning_rate", "Learning rate", "", zero=True),
    "expert_load_max": Figure("expert_load", "Highest load of an expert", "of the mean", zero=True, smooth=True),
    "tokens_per_second": Figure("throughput", "Throughput", "target tokens per second", zero=True, smooth=True),
    "model_flops_utilization": Figure(
        "utilization", "Model FLOPs utilization", "of the devices' peak", zero=True, smooth=True, percent=True
    ),
}


def figures(histories: Sequence[History], *, points: int = POINTS) -> list[Figure]:
    """All figures of training that have values in at least one run; a line has at most about so many points."""
    curves = [_of_logs(histories, key, figure, points) for key, figure in CURVES.items()]
    time = [_time(histories[0])] if len(histories) == 1 else []
    loss, others = _loss(histories, points), _other_metrics(histories)
    others += _own(histories, points)
    every = [loss, _bits(loss, histories), *others, *curves, *time, _memory(histories, points)]
    return [figure for figure in every if figure.series]


def marks(histories: Sequence[History]) -> list[Mark]:
    """The events of all runs, for every curve."""
    found: list[Mark] = []
    for run, history in enumerate(histories):
        for before, after in history.resumptions():
            found += _of_resumption(history, run, before, after)
        origin = origin_of(history)
        found += [
            Mark(event["event"], run, event["step"], _since(event, origin), str(event.get("message", event["event"])))
            for event in history.of_kind("compilation", "trouble")
            if isinstance(event.get("step"), int)
        ]
    return found


def _of_resumption(history: History, run: int, before: Attempt, after: Attempt) -> list[Mark]:
    resumed, origin = after.first or 0, origin_of(history)
    found = []
    if before.last is not None and before.last > resumed:
        label = f"steps {resumed + 1} to {before.last} were trained again"
        line = next((line for line in reversed(history.logs) if line["step"] <= resumed), {"time": before.began})
        end = _since({"time": before.last_time}, origin)
        found.append(Mark("lost", run, resumed, _since(line, origin), label, before.last, end))
    how = f"; the process before it: {before.ended}" if before.ended else ""
    time = _since({"time": after.began}, origin)
    return [*found, Mark("resumed", run, resumed, time, f"{after.origin}{how}")]


# The figures


def _loss(histories: Sequence[History], points: int) -> Figure:
    figure = Figure("loss", "Loss", "mean over target tokens", smooth=True)
    for run, history in enumerate(histories):
        figure.series += _lines(history, run, "training", "loss", points)
        figure.series += [
            series for name in _metric_names([history]) if name.endswith("loss")
            for series in _points(history, run, name)
        ]  # fmt: skip
    return figure


def _bits(loss: Figure, histories: Sequence[History]) -> Figure:
    """The loss of models of bytes, in bits."""
    found = [
        replace(each, y=_scaled(each.y, 1 / math.log(2)), mean=each.mean and _scaled(each.mean, 1 / math.log(2)))
        for each in loss.series
        if histories[each.run].of_bytes
    ]
    return replace(loss, name="bits", title="Bits per byte", unit="loss / ln 2, of models of bytes", series=found)


def _scaled(values: list[float | None], factor: float) -> list[float | None]:
    return values if factor == 1 else [None if value is None else value * factor for value in values]


def _other_metrics(histories: Sequence[History]) -> list[Figure]:
    found = []
    for name in _metric_names(histories):
        if not name.endswith("loss"):
            title = name.removeprefix("eval_").replace("_", " ").capitalize()
            series = [each for run, history in enumerate(histories) for each in _points(history, run, name)]
            found.append(Figure(name, title, "evaluation", series))
    return found


def _own(histories: Sequence[History], points: int) -> list[Figure]:
    """What a program has logged beside training and evaluations."""
    logged = {name for each in histories for line in each.own for name in line if finite_number(line[name]) is not None}
    found = []
    for name in sorted(logged - {"step", "epoch", "time"}):
        runs = ((run, each, [line for line in each.own if name in line]) for run, each in enumerate(histories))
        series = [line_of(each, run, own, name, name, points) for run, each, own in runs if own]
        found.append(Figure(name, name, "logged by the program", series))
    return found


def _of_logs(histories: Sequence[History], key: str, empty: Figure, points: int) -> Figure:
    series = [each for run, history in enumerate(histories) for each in _lines(history, run, key, key, points)]
    values = sorted(y for each in series for y in each.y if y is not None and y > 0)
    spread = not empty.zero and bool(values) and values[-1] > 50 * values[len(values) // 2]
    return replace(empty, series=series, log=spread)


def _time(history: History) -> Figure:
    """Seconds of each part, in bars of equally many steps, including the steps that were trained again."""
    logs = [*chain(*history.lost), *history.logs, *history.closing]
    logs = [line for line in logs if any(finite_number(line.get(key)) is not None for key in PARTS.values())]
    if not logs:
        return Figure("time", "Where the time went", "")
    logs.sort(key=lambda line: float(line["step"]))
    width = max(math.ceil((logs[-1]["step"] + 1) / BARS), logs[0]["step"], 1)
    bars = [list(bar) for _, bar in groupby(logs, lambda line: (line["step"] - 1) // width)]
    figure = Figure("time", "Where the time went", f"seconds in {width} steps" if width > 1 else "seconds", zero=True)
    origin = origin_of(history)
    x, times = [float(bar[-1]["step"]) for bar in bars], [_since(bar[-1], origin) for bar in bars]
    for part in PARTS:
        sums: list[float | None] = [_spent(bar, part) for bar in bars]
        if any(sums):
            figure.series.append(Series(part, "bar", 0, x, sums, times))
    return figure


def _memory(histories: Sequence[History], points: int) -> Figure:
    figure = Figure("memory", "Memory of rank 0", "GB", zero=True)
    for run, history in enumerate(histories):
        for key, name in (("host_memory", "host"), ("device_memory", "device"), ("device_memory_peak", "device, peak")):
            figure.series += _lines(history, run, name, key, points, scale=1 / GIGA)[:1]
    return figure


def system_figures(histories: Sequence[History], *, points: int = POINTS) -> list[Figure]:
    """What the machine did: processor, memory, disk and network of each rank of one run, or of rank 0 of several; of
    many ranks those that differ most in their processor time."""
    found = [
        Figure("processor", "Processor", "cores that a rank's process used", zero=True),
        Figure("rank_memory", "Memory of the ranks", "GB resident", zero=True),
        Figure("rank_device_memory", "Device memory of the ranks", "GB", zero=True),
        Figure("disk", "Disk", "MB per second, read and written by a rank's process", zero=True),
        Figure("network", "Network", "MB per second, received and sent by a rank's host", zero=True),
    ]
    sources = "processor", "memory", "device_memory", "disk_read disk_written", "network_received network_sent"
    scales = (1.0, 1 / GIGA, 1 / GIGA, 1 / MEGA, 1 / MEGA)
    for run, history in enumerate(histories):
        samples = read_samples(history.folder)
        ranks = _shown(samples) if len(histories) == 1 else sorted(samples)[:1]
        for rank in ranks:
            for figure, fields, scale in zip(found, sources, scales, strict=True):
                sums = [(line, _sum(line, fields.split())) for line in samples[rank]]
                lines = [{**line, "value": total} for line, total in sums if total is not None]
                if lines:
                    figure.series.append(line_of(history, run, lines, f"rank {rank}", "value", points, scale))
        if len(ranks) < len(samples) and len(histories) == 1:
            for figure in found:
                figure.unit += f"; {len(ranks)} of {len(samples)} ranks, those with the least and most processor time"
    return [figure for figure in found if figure.series]


def read_samples(folder: Path) -> dict[int, list[Line]]:
    """The samples of each rank, by step and time; of steps that were trained again, all."""
    found = {}
    for path in files_in(folder / SYSTEM, "rank-*.jsonl"):
        match = re.fullmatch(r"rank-(\d+)\.jsonl", path.name)
        lines = [line for line in read_lines(path) if line.get("step") is not None]
        if match and lines:
            found[int(match[1])] = sorted(lines, key=lambda line: (line["step"], line.get("time") or 0.0))
    return found


def _shown(samples: Mapping[int, Sequence[Line]]) -> list[int]:
    if len(samples) <= RANKS:
        return sorted(samples)
    by_use = sorted(
        samples, key=lambda rank: sum(line.get("processor") or 0.0 for line in samples[rank]) / len(samples[rank])
    )
    return sorted((*by_use[: RANKS // 2], *by_use[-RANKS // 2 :]))


def _sum(line: Line, fields: Sequence[str]) -> float | None:
    numbers = [number for name in fields if (number := finite_number(line.get(name))) is not None]
    return sum(numbers) if numbers else None


# Lines and points


def _lines(history: History, run: int, name: str, key: str, points: int = POINTS, scale: float = 1.0) -> list[Series]:
    """The curve of a logged value, and its discarded parts."""
    found = [line_of(history, run, history.logs, name, key, points, scale)]
    again = (line_of(history, run, lost, f"{name}, trained again", key, points, scale) for lost in history.lost)
    found += [replace(each, kind="lost") for each in again if any(y is not None for y in each.y)]
    return [series for series in found if series.x]


def line_of(
    history: History, run: int, lines: Sequence[Line], name: str, key: str, points: int, scale: float = 1.0
) -> Series:
    """The values of `key` in lines of a run that have it, times `scale`, thinned."""
    kept, origin = [line for line in lines if key in line], origin_of(history)
    values = _scaled([finite_number(line[key]) for line in kept], scale)
    indices, mean = thin(values, points)
    x, times = [float(kept[i]["step"]) for i in indices], [_since(kept[i], origin) for i in indices]
    return Series(name, "line", run, x, [values[i] for i in indices], times, mean=mean)


def axes(history: History, places: int = PLACES) -> dict[str, tuple[list[float], list[float]]]:
    """Steps, and the target tokens, epochs and FLOPs of the model by each of them, for the axes that the run has."""
    lines = {line["step"]: line for lines in (*history.lost, history.logs, history.closing) for line in lines}
    found: dict[str, tuple[list[float], list[float]]] = {}
    for axis, key in zip(AXES[:2], ("target_tokens", "epoch"), strict=True):
        values = {float(at): finite_number(lines[at].get(key)) for at in sorted(lines)}
        known = [(0.0, 0.0), *((at, value) for at, value in values.items() if value is not None)]
        every = math.ceil(len(known) / places)
        kept = [*known[:-1:every], known[-1]]
        if len(known) > 1:
            found[axis] = [at for at, _ in kept], [value for _, value in kept]
    costs = sorted(
        line["model_flops_per_second"] / line["tokens_per_second"]
        for line in history.logs
        if finite_number(line.get("model_flops_per_second")) and finite_number(line.get("tokens_per_second"))
    )
    if costs and "tokens" in found:
        steps, tokens = found["tokens"]
        cost = float(f"{costs[len(costs) // 2]:.6g}")  # the same in runs that differ by rounding
        found["flops"] = steps, [each * cost for each in tokens]
    return found


def interpolated(known: tuple[list[float], list[float]] | None, x: float) -> float | None:
    """The value at step `x` of an axis, linearly between known steps, and beyond the last one."""
    if known is None:
        return None
    steps, values = known
    at = min(max(bisect_left(steps, x), 1), len(steps) - 1)
    share = (x - steps[at - 1]) / (steps[at] - steps[at - 1])
    return values[at - 1] + share * (values[at] - values[at - 1])


def _points(history: History, run: int, metric: str) -> list[Series]:
    """A metric of the run's own evaluations and of concurrent ones, one curve per setup."""
    having = [each for each in history.evaluations if metric in each.values]
    setups = sorted({each.setup for each in having if each.concurrent})
    name = metric.removeprefix("eval_").replace("_", " ")
    name = "evaluation" if name == "loss" else f"evaluation {name}"
    curves = [(name, [each for each in having if not each.concurrent])]
    for number, setup in enumerate(setups, 1):
        which = f", concurrent ({number})" if len(setups) > 1 else ", concurrent"
        curves.append((name + which, [each for each in having if each.concurrent and each.setup == setup]))
    return [_point_series(history, run, metric, name, chosen) for name, chosen in curves if chosen]


def _point_series(history: History, run: int, metric: str, name: str, chosen: list[EvaluationPoint]) -> Series:
    best, origin = history.best(), origin_of(history)
    at = None
    if best is not None and best.metric == metric and best.concurrent == chosen[0].concurrent:
        wanted = (best.step, best.value)
        at = next((i for i, each in enumerate(chosen) if (each.step, each.values[metric]) == wanted), None)
    x, y = [float(each.step) for each in chosen], [finite_number(each.values[metric]) for each in chosen]
    times = [None if each.time is None else max(each.time - origin, 0.0) for each in chosen]
    return Series(name, "points", run, x, y, times, at, hollow=chosen[0].concurrent)


def _metric_names(histories: Sequence[History]) -> list[str]:
    return sorted({name for history in histories for each in history.evaluations for name in each.values})


def origin_of(history: History) -> float:
    """When the run began, in seconds since 1970; 0 if that is unknown."""
    return min((attempt.began for attempt in history.attempts if attempt.began is not None), default=0.0)


def _since(line: Line, origin: float) -> float | None:
    time = finite_number(line.get("time"))
    return None if time is None else max(time - origin, 0.0)


def total_seconds(history: History) -> dict[str, float]:
    """Seconds of each part over the complete run. "again" holds those of steps that were trained again; the first of
    their logs may have the save and the evaluation from which the run went on."""
    kept, lost = [*history.logs, *history.closing], list(chain(*history.lost))
    found = {part: _spent(kept if part in TRAINING else [*kept, *lost], part) for part in PARTS}
    again = sum(_spent(lost, part) for part in TRAINING)
    return {**found, "again": again} if again else found


def _spent(lines: Iterable[Line], part: str) -> float:
    key = PARTS[part]
    return sum(finite_number(line[key]) or 0.0 for line in lines if key in line)


def thin(values: Sequence[float | None], most: int) -> tuple[list[int], list[float | None] | None]:
    """Indices of at most about `most` values: the minimum, the maximum and any gap of each run of neighbours; and for
    each the mean of its run, since minimum and maximum alone would give a wrong one; None if all are kept."""
    if len(values) <= most:
        return list(range(len(values))), None
    size = math.ceil(2 * len(values) / most)
    kept: set[int] = {0, len(values) - 1}
    means: list[float | None] = []
    for start in range(0, len(values), size):
        run = range(start, min(start + size, len(values)))
        kept |= {i for i in run if values[i] is None and (i == start or values[i - 1] is not None)}
        drawn = [(value, i) for i in run if (value := values[i]) is not None]
        if drawn:
            kept |= {min(drawn)[1], max(drawn)[1]}
        means.append(sum(value for value, _ in drawn) / len(drawn) if drawn else None)
    indices = sorted(kept)
    return indices, [None if values[i] is None else means[i // size] for i in indices]
