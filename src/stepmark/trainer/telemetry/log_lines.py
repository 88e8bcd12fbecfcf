"""The lines that a run prints: for people, or as JSON objects (`log_format: json`)."""

from __future__ import annotations

import time
from typing import Any

from stepmark.liveness.console import json_line

SHOWN = {"learning_rate": "lr {:.2e}", "tokens_per_second": "{:,.0f} tokens/s"}


def log_line(step: int, total: int, values: dict[str, Any], seconds_left: float | None, log_format: str) -> str:
    """One log: time of day, step, loss, learning rate, tokens per second and the time that is left."""
    if log_format == "json":
        return json_line({"step": step, "total_steps": total, **values, "eta_seconds": seconds_left})
    parts = [f"step {step}/{total}"]
    if values.get("loss") is not None:
        parts.append(f"loss {decimals(values['loss'])}")
    for name, form in SHOWN.items():
        if values.get(name) is not None:
            parts.append(form.format(values[name]))
    if seconds_left is not None:
        parts.append(f"{duration(seconds_left)} left")
    return f"{time.strftime('%H:%M:%S')}  " + "  ".join(parts)


def decimals(value: float) -> str:
    """With four decimals, or of a number so large that these say nothing its four first digits."""
    return f"{value:.4f}" if abs(value) < 1e9 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """A time span such as 45 s, 3:20 min or 2:05 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"
