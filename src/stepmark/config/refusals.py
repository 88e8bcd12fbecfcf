"""Names that Stepmark refuses, and what to use instead: the table `refusals.csv`, a page of the documentation."""

from __future__ import annotations

import csv
import functools
from pathlib import Path
from typing import Literal

# transformers: arguments of its TrainingArguments; run_clm: of its example; elsewhere: fields and keywords of older
# versions and of other tools; gone: commands, options and their values (after their command), and values (after their
# field), that Stepmark had; export: what other packages export; hook: methods of transformers' Trainer; optim: its
# optimizers; optim_args: their options that have a field; fsdp_config: options of transformers there.
Origin = Literal["transformers", "run_clm", "elsewhere", "gone", "export", "hook", "optim", "optim_args", "fsdp_config"]


@functools.cache
def refusals(origin: Origin) -> dict[str, str]:
    """What to use instead of each name of this origin."""
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as table:
        return {row["name"]: row["instead"] for row in csv.DictReader(table) if row["origin"] == origin}
