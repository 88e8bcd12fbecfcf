"""Compares the losses of every transformers model class that takes labels with means computed by hand.

Each class is built with a small random configuration. Training loss, eval_loss and gradient norm are those of the mean
over targets or samples, at batch sizes 1, 2 and 5 with a ragged last one, and accumulation 1 and 4.

    PYTHONPATH=. python scripts/losses.py [--only CLASS …] [--jobs N] [--write]

--jobs is the number of processes. With --write the results go to docs/data/losses.json.
"""

from __future__ import annotations

import argparse
import multiprocessing
import warnings
from concurrent.futures import ProcessPoolExecutor

import torch
import transformers

from scripts.tables import write_table
from tests.support.label_models import classes_with_labels
from tests.support.loss_checks import Verdict, verdict

COLUMNS = ("class", "task", "outcome", "why")


def write(verdicts: list[Verdict]) -> None:
    made_by = (
        f"`PYTHONPATH=. python scripts/losses.py --write` with transformers {transformers.__version__} and "
        f"torch {torch.__version__.split('+')[0]}"
    )
    found = [(each.name, each.task or "other", each.outcome, each.why) for each in verdicts]
    rows = [dict(zip(COLUMNS, each, strict=True)) for each in sorted(found)]
    write_table("losses", "Losses of model classes", made_by, rows)


def _silence() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=None)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    verdicts = []
    with ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("spawn"), _silence) as pool:
        for each in pool.map(verdict, arguments.only or classes_with_labels()):
            verdicts.append(each)
            print(f"{each.outcome:10} {each.name:50} {each.why}", flush=True)
    if arguments.write:
        write(verdicts)


if __name__ == "__main__":
    main()
