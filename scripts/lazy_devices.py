"""Counts what a lazy device does for every causal language model of transformers, and a few others.

Each is built small, with random weights, and trained 6 steps on XLA's CPU client in a process of its own, without
gradient accumulation and with two micro-batches, and evaluated in between.

    python -m scripts.lazy_devices [--only NAME …] [--timeout SECONDS] [--write]

With --write the results go to docs/data/lazy-devices.json; rows of models that were not tried stay.
"""

from __future__ import annotations

import argparse
import os
import time
from importlib.metadata import version
from typing import Any

from scripts import tables

TIMEOUT = 120  # seconds for each model, unless given
COLUMNS = ("model", "step", "step of 2 micro-batches", "evaluation batch", "what reads the device", "date")
KINDS = ("1", "2", "evaluation")
EXPECTED = ("1, 0, 0", "3, 0, 0", "1, 0, 0")
Row = tuple[str, ...]


def names() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from tests.support.lazy_models import OTHERS

    return [*OTHERS, *sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)]


def row(name: str, outcome: Any, timeout: int) -> Row:
    """The table's line for what `tests.support.lazy_models.count` gave in a process that had `timeout` seconds."""
    date = time.strftime("%Y-%m-%d")
    if outcome.codes != [0]:
        return (name, "", "", "", reason(outcome, timeout), date)
    found = outcome.results[0]
    counts = [", ".join(str(found[kind][index]) for index in (1, 0, 2)) for kind in KINDS]
    return (name, *counts, "; ".join(f"`{line}`" for line in found["lines"]), date)


def reason(outcome: Any, timeout: int) -> str:
    """The last line of the process's output that names an error."""
    if outcome.codes == [None]:
        return f"took longer than {timeout} seconds"
    lines = [line.strip() for line in outcome.logs[0].splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "Check failed" in line]
    return (errors or lines or ["no output"])[-1][:160].replace("|", "/")


def state(row: Row) -> str:
    """Whether a model leaves the device undisturbed, disturbs it, or was not counted."""
    if not row[1]:
        return "not counted"
    return "undisturbed" if row[1:4] == EXPECTED else "disturbed"


def read_rows() -> dict[str, Row]:
    """The table's rows by model."""
    return {row["model"]: tuple(row[name] for name in COLUMNS) for row in tables.read_rows("lazy-devices")}


def write(rows: list[Row]) -> None:
    versions = ", ".join(f"{name} {version(name)}" for name in ("transformers", "torch", "torch_xla"))
    made_by = f"`python -m scripts.lazy_devices --write` with {versions}"
    named = [{"model": row[0], "state": state(row), **dict(zip(COLUMNS, row, strict=True))} for row in rows]
    tables.write_table("lazy-devices", "Models on lazy devices", made_by, named)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=None)
    parser.add_argument("--timeout", type=int, default=TIMEOUT, help="seconds for each model")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # compiles faster, counts the same
    from tests.support.ranks import EAGER_MODULES, Ranks

    ranks = Ranks(*EAGER_MODULES, "torch_xla", "tests.support.lazy_models", "scripts.small_models")
    order = names()
    rows = read_rows()
    for name in arguments.only or order:
        outcome = ranks.run("tests.support.lazy_models:count", name, timeout=arguments.timeout)
        rows[name] = row(name, outcome, arguments.timeout)
        print(" | ".join(rows[name]), flush=True)
        if arguments.write:
            write([rows[each] for each in order if each in rows])
    ranks.close()


if __name__ == "__main__":
    main()
