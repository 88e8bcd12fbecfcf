"""The top of the page: the run's state, its trouble, and a few numbers."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence

from stepmark.checkpoint.format.checkpoint_folders import checkpoints as checkpoints_in
from stepmark.errors import FileRefused
from stepmark.filesystem.files import files_in, read_file
from stepmark.liveness.console import CONSOLE
from stepmark.recipe.used_recipe import USED_RECIPE
from stepmark.report import text
from stepmark.report.checkpoints import Checkpoint, inspected
from stepmark.report.history import NOT_RUNNING, RECENT, History
from stepmark.trainer.run_folder.status import STUCK
from stepmark.trainer.run_folder.time_spent import PARTS, seconds_in

STATES = {"done": "good", "running": "plain", "interrupted": "warn", "failed": "bad", NOT_RUNNING: "bad", STUCK: "bad"}
CORRUPTED = {"corrupted": "is corrupted", "quarantined": "was corrupted and is quarantined"}
SHOWN_RANKS = 8  # whose failures are listed
SHOWN_LINES = 40  # of a console
SHOWN_PARTS = 3  # of a run's time, besides steps


def notes(history: History) -> list[str]:
    """What stands beside a run's state."""
    step, started = history.last_step, history.started
    total = started.get("total_steps")
    found = ["no step logged yet" if step is None else f"step {step:,}" + (f" of {total:,}" if total else "")]
    if started.get("device"):
        device = started.get("device_model") or started["device"]
        found.append(f"{text.plural(started.get('ranks', 1), 'rank')} on {device}")
    if history.last_update is not None:
        found.append(f"last update {text.moment(history.last_update)}")
    return found


def troubles(history: History, checkpoints: Sequence[Checkpoint]) -> list[tuple[str, str]]:
    """Kind and text of everything that is wrong, once each and the run's end first."""
    found = [
        *end_of_run(history),
        *((str(event.get("kind", "trouble")), str(event.get("message", ""))) for event in history.of_kind("trouble")),
        *(("save_failed", f"the save of step {event.get('step')} failed") for event in history.of_kind("save_failed")),
        *(
            ("corrupted", f"checkpoint-{one.step} {CORRUPTED[one.state]}: {one.detail}")
            for one in checkpoints
            if one.state in CORRUPTED
        ),
        *(
            ("evaluation", f"checkpoint-{line.get('step')} was not evaluated: {line.get('reason', 'it failed')}")
            for line in history.unevaluated
        ),
    ]
    return list(dict.fromkeys(found))


def end_of_run(history: History) -> list[tuple[str, str]]:
    """Why the run failed, or that it was killed."""
    titles = {name: told.partition("\n")[0] for name, told in history.failures.items()}
    kept = [("traceback", f"{name}: {title}") for name, title in titles.items()][:SHOWN_RANKS]
    if history.state == "failed":
        return [("failed", f"the run failed: {history.status.get('reason') or 'no reason was recorded'}"), *kept]
    if history.state == "interrupted":
        return kept
    if history.state == STUCK:
        return [(STUCK, _stuck(history))]
    if history.overdue is not None:
        age, usual = map(text.seconds, history.overdue)
        return [("overdue", f"nothing recorded for {age} (so far at most {usual} apart): check the run's output")]
    if history.state != NOT_RUNNING or history.liveness is None:
        return []
    host = f" on {history.liveness.host}" if history.liveness.host else ""
    newest = next((path.name for path in checkpoints_in(history.folder) if inspected(path)[0] is None), None)
    resume = f"; {newest} is the newest to resume from" if newest is not None else ""
    last = text.moment(history.liveness.last_beat)
    return [("killed", f"the run ended without a status (killed?); last heartbeat {last}{host}{resume}")]


def printed(history: History) -> dict[str, str]:
    """Each failed rank's traceback, and the last lines that the run has printed."""
    texts = {f"Traceback: {name}": told for name, told in list(history.failures.items())[:SHOWN_RANKS]}
    for path in files_in(history.folder / CONSOLE, "*.txt")[:SHOWN_RANKS]:
        with contextlib.suppress(FileRefused):
            lines = read_file(path).decode(errors="replace").splitlines()[-SHOWN_LINES:]
            texts[f"Console: {CONSOLE}/{path.name}"] = "\n".join(lines)
    return {name: told.strip() for name, told in texts.items()}


def _stuck(history: History) -> str:
    found = history.stuck
    if not found:
        return "no thread of the process runs"
    where = f" in {found['where']}, step {found.get('step')}" if "where" in found else ": no heartbeat"
    return f"stuck: rank {found.get('rank')}{where}"


def tiles(history: History, checkpoints: Sequence[Checkpoint]) -> list[tuple[str, str, str]]:
    """A few numbers, each with a name and a note."""
    found: list[tuple[str, str, str]] = []
    if history.logs:
        last = history.logs[-1]
        found.append(("Training loss", text.value(last.get("loss")), f"step {last['step']:,}"))
    if (best := history.best()) is not None:
        name = best.metric.removeprefix("eval_").replace("_", " ")
        found.append((f"Best evaluation {name}", text.value(best.value), f"step {best.step:,}"))
    found += _speed(history)
    found += _size(history)
    complete = [one.step for one in checkpoints if one.state == "complete"]
    if checkpoints:
        newest = f"newest: step {max(complete):,}" if complete else "none is complete"
        found.append(("Checkpoints", f"{len(complete)}", newest))
    resumed = len(history.attempts) - 1
    if resumed > 0:
        again = sum(max((before.last or 0) - (after.first or 0), 0) for before, after in history.resumptions())
        times = "once" if resumed == 1 else f"{resumed} times"
        found.append(("Resumed", times, f"{text.plural(again, 'step')} trained again"))
    return found + _goodput(history)


def _goodput(history: History) -> list[tuple[str, str, str]]:
    """The share of the time since the run began that went into steps which count, and what took most of the rest."""
    spent = seconds_in(history.status)
    whole = sum(spent.values())
    if not whole:
        return []
    others = sorted(((taken / whole, PARTS[part]) for part, taken in spent.items() if part != "kept"), reverse=True)
    named = [f"{share:.0%} {words}" for share, words in others[:SHOWN_PARTS] if share >= 0.005]
    return [("Goodput", f"{spent['kept'] / whole:.1%}", "; ".join([f"of {text.seconds(whole)}", *named]))]


def recent_median(history: History, key: str) -> float | None:
    """The median of a logged value over the last logs."""
    values = _recent(history, key)
    return values[len(values) // 2] if values else None


def unit_of(history: History) -> str:
    """What the targets are. Where each sample has one, it is no token: the two rates are equal, but for runs of older
    versions, which read the clock twice."""
    tokens, samples = (recent_median(history, f"{unit}_per_second") for unit in ("tokens", "samples"))
    return "samples" if tokens and samples and abs(tokens / samples - 1) < 1e-2 else "tokens"


def _recent(history: History, key: str) -> list[float]:
    return sorted(line[key] for line in history.logs[-RECENT:] if isinstance(line.get(key), (int, float)))


def _speed(history: History) -> list[tuple[str, str, str]]:
    found = []
    for key, name, form in (
        ("tokens_per_second", f"{unit_of(history).capitalize()} per second", "{:,.0f}"),
        ("model_flops_utilization", "FLOPs utilization", "{:.1%}"),
    ):
        if (median := recent_median(history, key)) is not None:
            logs = text.plural(len(_recent(history, key)), "log")
            found.append((name, form.format(median), f"median of {logs}"))
    return found


def _size(history: History) -> list[tuple[str, str, str]]:
    """Parameters, target tokens so far, and the time that is left."""
    found = []
    parameters, trained = history.started.get("parameters"), history.started.get("trained_parameters")
    if parameters:
        note = "all trained" if trained == parameters else f"{text.count(trained)} of them trained"
        found.append(("Parameters", text.count(parameters), note))
    if tokens := history.target_tokens:
        known = max(line["step"] for line in [*history.logs[-1:], *history.closing[-1:]] if "target_tokens" in line)
        up_to = "" if known == history.last_step else f", to step {known:,}"
        found.append((f"{unit_of(history).capitalize()} seen", text.count(tokens), f"targets of the loss{up_to}"))
    left, update = history.status.get("eta_seconds"), history.status.get("time")
    if history.state == "running" and history.overdue is None and isinstance(left, (int, float)):
        end = f"about {text.moment(update + left)}" if isinstance(update, (int, float)) else "at the pace so far"
        found.append(("Time left", text.seconds(left), end))
    return found


def commands(history: History) -> list[tuple[str, str]]:
    """What continues, evaluates and watches the run, by a name. A script's run has no recipe that names its data."""
    folder = shlex.quote(str(history.folder))
    recipe, ranks = history.folder / USED_RECIPE, history.started.get("ranks", 1)
    found = []
    if recipe.is_file() and history.state not in ("running", "done", STUCK):
        several = f" --nproc {ranks}" if ranks > 1 else ""
        more = f" --output_dir {folder} --resume_from_checkpoint true{several}"
        found.append(("resume", f"stepmark train {shlex.quote(str(recipe))}{more}"))
    if recipe.is_file() or any(history.folder.glob("checkpoint-*/tokenizer*")):
        data = "" if recipe.is_file() else " --data FILE"
        watch = " --watch" if history.state in ("running", STUCK) else ""
        found.append(("evaluate", f"stepmark evaluate {folder}{data}{watch}"))
    return found
