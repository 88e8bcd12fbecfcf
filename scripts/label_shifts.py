"""Finds whether position t predicts label t + 1, for the classes of transformers whose code does not show it.

Each class is built with a small random configuration and called three times: with its labels, with only the first one
of each row, and with none. Where the first one counts, labels are not shifted.

    PYTHONPATH=. python scripts/label_shifts.py [--only CLASS … | --write]

With --write the results of all classes go to src/stepmark/training/label_shifts.json.
"""

from __future__ import annotations

import argparse
import json
import math

import torch
import transformers
from torch import Tensor, nn

from stepmark.training.model_labels import SHIFTS, label_rule, shown_shift
from tests.support.label_models import NotMade, batch_of, classes_with_labels, make


def shift_of(name: str) -> bool | None:
    """Whether a class shifts its labels; None where its code shows it, it has one label per sample, or its loss does
    not depend on labels. Raises NotMade."""
    case = make(name)
    batch = batch_of(case.samples[:2])
    labels = batch.get("labels")
    several = isinstance(labels, Tensor) and labels.ndim > 1 and labels.shape[1] > 1 and not labels.is_floating_point()
    if not several or shown_shift(case.model) is not None:
        return None
    assert isinstance(labels, Tensor)
    ignored = label_rule(case.model).ignored
    first = torch.full_like(labels, ignored)
    none = first.clone()
    first[:, 0] = torch.where(labels[:, 0] == ignored, labels.max(), labels[:, 0]).clamp(min=0)
    losses = [loss_of(case.model, {**batch, "labels": each}) for each in (first, none, labels)]
    if not math.isfinite(losses[0]):  # a mean over no targets
        return True
    if losses[0] != losses[1]:
        return False
    return True if losses[2] != losses[1] else None


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> float:
    torch.manual_seed(0)
    with torch.no_grad():
        return float(model(**batch).loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--only", nargs="+", default=None)
    way.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    found = {}
    for name in arguments.only or classes_with_labels():
        try:
            shift = shift_of(name)
        except NotMade:
            continue
        if shift is not None:
            found[name] = shift
            print(f"{name:50} {shift}", flush=True)
    if arguments.write:
        SHIFTS.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
