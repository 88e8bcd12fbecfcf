"""`stepmark inspect RUN`: the state of a run in a few lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepmark.report.history import History


def print_run(folder: Path, *, as_json: bool) -> None:
    """Prints a summary of the run in `folder`. Raises UsageError if the folder is not a run's."""
    from stepmark.report.history import read_history

    summary = summarize(read_history(folder))
    print(json.dumps(summary, indent=2) if as_json else "\n".join(_lines(summary)))


def summarize(history: History) -> dict[str, Any]:
    """The state, progress, newest log, best evaluation and checkpoints; None where something is unknown."""
    from stepmark.checkpoint.format.checkpoint_folders import checkpoints, step_of
    from stepmark.report.checkpoints import read_checkpoints
    from stepmark.report.summary import end_of_run, recent_median, unit_of

    status, started = history.status, history.started
    last, best = (history.logs or [{}])[-1], history.best()
    running = history.state == "running"
    return {
        "folder": str(history.folder),
        "state": history.state,
        "reason": status.get("reason"),
        "step": history.last_step,
        "total_steps": status.get("total_steps") or started.get("total_steps"),
        "eta_seconds": status.get("eta_seconds") if running else None,
        "updated": history.last_update,
        "host": status.get("host"),
        "process": status.get("process"),
        "ranks": started.get("ranks"),
        "device": started.get("device_model") or started.get("device"),
        "loss": last.get("loss"),
        "learning_rate": last.get("learning_rate"),
        "tokens_per_second": recent_median(history, "tokens_per_second"),
        "targets": unit_of(history),
        "best": None if best is None else {"metric": best.metric, "step": best.step, "value": best.value},
        "checkpoints": sorted(step for path in checkpoints(history.folder) if (step := step_of(path)) is not None),
        "resumed": len(history.resumptions()),
        "trouble": [told for kind, told in end_of_run(history, read_checkpoints(history)) if kind != "failed"],
    }


def _lines(summary: dict[str, Any]) -> list[str]:
    from stepmark.report import text

    total, eta, best = summary["total_steps"], summary["eta_seconds"], summary["best"]
    speed = summary["tokens_per_second"]
    step = text.NOTHING if summary["step"] is None else f"{summary['step']:,}"
    step += f" of {total:,}" if total else ""
    step += f", {text.seconds(eta)} left" if eta is not None else ""
    rows = {
        "state": summary["state"] + (f": {summary['reason']}" if summary["reason"] else ""),
        "step": step + (f", resumed {text.plural(summary['resumed'], 'time')}" if summary["resumed"] else ""),
        "updated": None if summary["updated"] is None else text.moment(summary["updated"]),
        "process": None if summary["process"] is None else f"{summary['process']} on {summary['host']}",
        "devices": None if not summary["device"] else f"{text.plural(summary['ranks'], 'rank')} on {summary['device']}",
        "loss": None if summary["loss"] is None else text.value(summary["loss"]),
        "speed": speed and f"{speed:,.0f} {summary['targets']}/s",
        "best": best and f"{best['metric']} {text.value(best['value'])} at step {best['step']:,}",
        "saved": ", ".join(f"checkpoint-{step}" for step in summary["checkpoints"]) or "no checkpoint",
    }
    return [*(f"{name:<9} {value}" for name, value in rows.items() if value), *summary["trouble"]]
