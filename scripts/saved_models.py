"""Compares the model folders that Stepmark writes with those of `save_pretrained`, for every model of the tables.

Each model is small and has random weights. Names, types, shapes and values of tensors, and the configs, have to be
equal bit for bit: in the folder that one rank writes, and in that of two ranks that share the parameters.
`from_pretrained` has to read a checkpoint, and an adapter has to be as PEFT saves it.

    PYTHONPATH=. python scripts/saved_models.py [--only NAME …] [--jobs N] [--write]

--jobs is the number of pairs of ranks. With --write the results go to docs/data/saved-models.json.
"""

from __future__ import annotations

import argparse
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import peft
import torch
import transformers

from scripts.tables import Row, read_rows, write_table
from tests.support.ranks import Ranks, Zygote
from tests.support.saved_models import compare_all

TYPES = ("tensor-parallel", "pipeline-parallel", "expert-parallel")  # tables by model type
BATCH = 12  # models that a pair of ranks compares before a new one begins
SECONDS = 300  # that it may take; one model, a third of that


def names() -> list[str]:
    """Every model type and class of the tables."""
    types = {row["model type"] for table in TYPES for row in read_rows(table)}
    return [*sorted(types), *(row["class"] for row in read_rows("losses"))]


def compare(wanted: list[str], jobs: int) -> list[Row]:
    """A row for each name, in their order."""
    batches = [wanted[start : start + BATCH] for start in range(0, len(wanted), BATCH)]
    with closing(Zygote("torch", "transformers", "tests.support.saved_models")) as zygote:

        def run(batch: list[str]) -> list[Row]:
            with closing(Ranks(zygote.address)) as ranks:
                found = ranks.run(compare_all, batch, nproc=2, timeout=SECONDS if len(batch) > 1 else SECONDS / 3)
            if any(found.codes) and len(batch) > 1:  # of one model, which is to be named
                return [row for name in batch for row in run([name])]
            rows: list[Row] = found.check()[0]
            for row in rows:
                print(*(value for key, value in row.items() if key != "digest"), flush=True)
            return rows

        with ThreadPoolExecutor(jobs) as pool:
            return [row for rows in pool.map(run, batches) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=None)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    arguments = parser.parse_args()
    rows = compare(arguments.only or names(), arguments.jobs)
    if arguments.write:
        made_by = (
            f"`PYTHONPATH=. python scripts/saved_models.py --write` with transformers {transformers.__version__}, "
            f"peft {peft.__version__} and torch {torch.__version__.split('+')[0]}"
        )
        write_table("saved-models", "Model folders beside those of save_pretrained", made_by, rows)


if __name__ == "__main__":
    main()
