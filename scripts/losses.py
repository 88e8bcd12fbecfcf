"""Compares the losses of every transformers model class that takes labels with means computed by hand.

Each class is built with a small random configuration. Training loss, eval_loss and gradient norm are those of the mean
over targets or samples, at batch sizes 1, 2 and 5 with a ragged last one, and accumulation 1 and 4.

    PYTHONPATH=. python scripts/losses.py [--only CLASS …] [--jobs N] [--write]

--jobs is the number of processes. With --write the results go to docs/losses.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import transformers

from tests.support.label_models import ALIGNED, classes_with_labels
from tests.support.loss_checks import ACCUMULATIONS, BATCHES, Verdict, verdict

PAGE = Path(__file__).resolve().parents[1] / "docs" / "losses.md"
INTRODUCTION = f"""# Losses

Training loss and `eval_loss` are means over all targets of a step, or of an evaluation set: label tokens that are not
-100, or samples where a model has one label for each. They do not depend on batch size, accumulation, padding or the
number of ranks.

- A model's own loss is taken as the mean over its micro-batch, and weighted by the micro-batch's targets. Whether a
  head divides by `num_items_in_batch` or ignores it makes no difference.
- Labels are the arguments of `forward` that transformers' `find_labels` names: `labels`, `start_positions`,
  `end_positions` and others. `compute_metrics` gets them as `label_ids`: one array, or a tuple where there are several.
  It is not called for a dataset without labels.
- Whether a model predicts label t + 1 at position t is read from its class. Where the class does not show it, the model
  is asked once, in eval mode: does the first label of a row change the loss? Label smoothing follows the answer.
- `compute_loss_func(outputs, labels, num_items_in_batch)` may return a mean, or a sum divided by `num_items_in_batch`,
  which is the number of targets of the micro-batch (transformers: of all micro-batches of the step). Both give the
  mean over the step's targets. The first batch shows, in two or three extra calls, which labels the function counts.
- A batch without a target has weight 0. A model may return a tuple; its loss comes first then.
- CTC models with `ctc_loss_reduction="sum"` train on the mean over samples.
- `LevitForImageClassification` keeps its attention biases, with their graph, in eval mode, where this comparison takes
  its gradients: PyTorch's error in the table is about a second backward pass through it. In training it keeps none.
- A loss that adds several means, as pretraining heads do, is weighted by the targets in `labels`.

Where this differs from transformers {transformers.__version__}: its Trainer divides by the number of items where a
forward merely accepts keyword arguments, and the sum of micro-batch means is then too large by the accumulation for
heads that ignore the number (BERT's, T5's and most classifiers), and the losses of these decoders count labels as they
are, without a shift, though label smoothing there shifts them: {", ".join(sorted(ALIGNED))}.
"""


def page(verdicts: list[Verdict]) -> str:
    """The documentation's page."""
    versions = f"transformers {transformers.__version__} and torch {torch.__version__.split('+')[0]}"
    outcomes = Counter(each.outcome for each in verdicts)
    lines = [
        INTRODUCTION,
        "## Model classes",
        "",
        f"Made by `PYTHONPATH=. python scripts/losses.py --write` with {versions}, on a CPU: every model",
        "class that takes labels, with a small random configuration and seven samples, at batch sizes",
        f"{', '.join(map(str, BATCHES))} and accumulation {' and '.join(map(str, ACCUMULATIONS))}. Expected values come"
        " from the model's logits for one",
        "sample at a time (for CTC from its loss for one sample). Models are in eval mode, so that dropout and batch",
        "statistics do not differ between batches.",
        "",
        f"{outcomes['equal']} classes are equal, {outcomes['different']} different, {outcomes['not tried']} were not"
        " tried.",
        "",
        "| task | equal | different | not tried |",
        "| --- | --- | --- | --- |",
    ]
    for task in sorted({each.task for each in verdicts}):
        count = Counter(each.outcome for each in verdicts if each.task == task)
        row = " | ".join(str(count[name]) for name in ("equal", "different", "not tried"))
        lines.append(f"| {task or 'other'} | {row} |")
    for outcome, title in (("different", "Different"), ("not tried", "Not tried")):
        chosen = [each for each in verdicts if each.outcome == outcome]
        lines += ["", f"## {title} ({len(chosen)})", "", "| class | why |", "| --- | --- |"]
        lines += [f"| `{each.name}` | {each.why.replace('|', '/')} |" for each in chosen]
    equal = ", ".join(f"`{each.name}`" for each in verdicts if each.outcome == "equal")
    return "\n".join([*lines, "", f"## Equal ({outcomes['equal']})", "", equal]) + "\n"


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
        PAGE.write_text(page(verdicts))


if __name__ == "__main__":
    main()
