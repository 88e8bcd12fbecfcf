"""Counts what a lazy device does for every causal language model of transformers, and a few others.

Each is built small, with random weights, and trained 6 steps on XLA's CPU client in a process of its own, without
gradient accumulation and with two micro-batches, and evaluated in between.

    python -m scripts.lazy_devices [--only NAME …] [--timeout SECONDS] [--write]

With --write the results go to docs/lazy-devices.md; rows of models that were not tried stay.
"""

from __future__ import annotations

import argparse
import os
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "lazy-devices.md"
TIMEOUT = 120  # seconds for each model, unless given
COLUMNS = ("model", "step", "step of 2 micro-batches", "evaluation batch", "what reads the device", "date")
KINDS = ("1", "2", "evaluation")
EXPECTED = ("1, 0, 0", "3, 0, 0", "1, 0, 0")
Row = tuple[str, ...]
INTRO = """\
# Models on lazy devices

Made by `python -m scripts.lazy_devices --write` with {versions}
on XLA's CPU client: every causal language model of transformers, and a few others, small and with random weights, in
six steps of the Trainer with evaluations in between. The cells hold graphs executed, graphs compiled, and transfers
from the device to the host: the most of any step from the third on, and of any evaluation batch but an evaluation's
first. Causal models get packed blocks without an attention mask, and padded batches with one where they accumulate.

A lazy device is undisturbed where a step is 1 execution (with several micro-batches, one more than these), 0
compilations and 0 transfers. In a forward pass on a lazy device, transformers leaves out what it leaves out of any
trace: warnings and checks that read values. What reads all the same is named in the last column, and in a warning of
the run: values that the model looks at, and operations that torch_xla does not have and runs on the host. Mixtures of
experts apply every expert to every token, so that no shape depends on the routing, at (experts / experts per token)
times the arithmetic.

The graphs of a recipe's run can be made ahead, and kept for later runs: [trainium.md](trainium.md#compiling-ahead).
"""


def names() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from tests.support.lazy_models import OTHERS

    return [*OTHERS, *sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)]


def row(name: str, outcome: Any, timeout: int) -> Row:
    """The table's line for what `tests.support.lazy_models.count` gave in a process that had `timeout` seconds."""
    date = time.strftime("%Y-%m-%d")
    if outcome.codes != [0]:
        return (name, "", "", "", f"not counted: {reason(outcome, timeout)}", date)
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


def undisturbed(row: Row) -> bool:
    return row[1:4] == EXPECTED


def read_rows() -> dict[str, Row]:
    """The page's rows by name."""
    lines = PAGE.read_text().splitlines() if PAGE.exists() else []
    rows = [tuple(cell.strip() for cell in line[1:-1].split("|")) for line in lines if line.startswith("| `")]
    return {row[0].strip("`"): (row[0].strip("`"), *row[1:]) for row in rows if len(row) == len(COLUMNS)}


def page(rows: list[Row]) -> str:
    good = [row for row in rows if undisturbed(row)]
    missing = [row for row in rows if not row[1]]
    disturbed = [row for row in rows if row[1] and not undisturbed(row)]
    versions = ", ".join(f"{name} {version(name)}" for name in ("transformers", "torch", "torch_xla"))
    intro = INTRO.format(versions=versions).splitlines()
    parts = [section("Disturbed", disturbed), section("Not counted", missing), section("Undisturbed", good)]
    return "\n".join([*intro, *(line for part in parts for line in part), ""])


def section(title: str, rows: list[Row]) -> list[str]:
    head = [f"| {' | '.join(COLUMNS)} |", "|" + " --- |" * len(COLUMNS)]
    return ["", f"## {title} ({len(rows)})", "", *head, *(f"| `{row[0]}` | {' | '.join(row[1:])} |" for row in rows)]


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
            PAGE.write_text(page([rows[each] for each in order if each in rows]))
    ranks.close()


if __name__ == "__main__":
    main()
