"""The optimizers that `optim` can name, and the other fields that they agree with."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from stepmark.config.fields import described_at
from stepmark.config.refusals import refusals
from stepmark.errors import UsageError

ADAMW = ("adamw_torch", "adamw_torch_fused")
SGD = "sgd"
ADAFACTOR = "adafactor"
ADAMW_8BIT = ("adamw_8bit", "adamw_bnb_8bit")  # transformers' two names for one optimizer
MUON = "muon"
OPTIMIZERS = (*ADAMW, SGD, ADAFACTOR, *ADAMW_8BIT, MUON)
# They use more of a parameter than the element that they update: norms, rows and columns, blocks of its elements.
WHOLE_PARAMETERS = frozenset({ADAFACTOR, *ADAMW_8BIT, MUON})


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raises UsageError for an option in `optim_args` that a field of its own sets. Adafactor's `eps` has none."""
    for option in options:
        field = refusals("optim_args").get(option)
        if field is not None and (name, option) != (ADAFACTOR, "eps"):
            raise UsageError(f"optim_args: {option} is set by a field of its own; use {field}")


def check_optimizer(name: str) -> None:
    """Raises UsageError for a name that is not in OPTIMIZERS, or whose library is not installed."""
    if name not in OPTIMIZERS:
        other = refusals("optim").get(name)
        instead = f"use {other}" if other else f"choose one of {', '.join(OPTIMIZERS)}"
        raise UsageError(f"optim: {name!r} is not supported; {instead}{described_at('optim')}")
    if name in ADAMW_8BIT and importlib.util.find_spec("bitsandbytes") is None:
        raise UsageError(f"optim: {name} needs bitsandbytes, which is not installed; pip install bitsandbytes")
