"""The optimizers that `optim` can name, and the other fields that they agree with."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from stepmark.errors import UsageError

ADAMW = ("adamw_torch", "adamw_torch_fused")
SGD = "sgd"
ADAFACTOR = "adafactor"
ADAMW_8BIT = ("adamw_8bit", "adamw_bnb_8bit")  # transformers' two names for one optimizer
MUON = "muon"
OPTIMIZERS = (*ADAMW, SGD, ADAFACTOR, *ADAMW_8BIT, MUON)
# They use more of a parameter than the element that they update: norms, rows and columns, blocks of its elements.
WHOLE_PARAMETERS = frozenset({ADAFACTOR, *ADAMW_8BIT, MUON})

# Other optimizers of transformers, and which makes the same updates.
INSTEAD = {
    "paged_adamw_8bit": "adamw_8bit, which makes the same updates and keeps its state in the device's memory",
    "paged_adamw_32bit": "adamw_torch, which makes the same updates and keeps its state in the device's memory",
    "adamw_hf": "adamw_torch",
    "adamw_apex_fused": "adamw_torch_fused",
    "adamw_torch_xla": "adamw_torch",
    "adamw_torch_npu_fused": "adamw_torch",
}


# Options of optimizers that have a field of their own.
FIELDS = {
    "lr": "learning_rate",
    "learning_rate": "learning_rate",
    "weight_decay": "weight_decay",
    "betas": "adam_beta1 and adam_beta2",
    "eps": "adam_epsilon",
}


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raises UsageError for an option in `optim_args` that a field of its own sets. Adafactor's `eps` has none."""
    for option in options:
        if option in FIELDS and (name, option) != (ADAFACTOR, "eps"):
            raise UsageError(f"optim_args: {option} is set by a field of its own; use {FIELDS[option]}")


def check_optimizer(name: str) -> None:
    """Raises UsageError for a name that is not in OPTIMIZERS, or whose library is not installed."""
    if name in INSTEAD:
        raise UsageError(f"optim: {name!r} is not supported; use {INSTEAD[name]}")
    if name not in OPTIMIZERS:
        raise UsageError(f"optim: {name!r} is not supported; choose one of {', '.join(OPTIMIZERS)}")
    if name in ADAMW_8BIT and importlib.util.find_spec("bitsandbytes") is None:
        raise UsageError(f"optim: {name} needs bitsandbytes, which is not installed; pip install bitsandbytes")
