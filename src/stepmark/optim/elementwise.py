"""Which optimizers update every element of a parameter independently of the others.

Only these may work on flat shards of parameters, as ZeRO-1 gives them.
"""

from __future__ import annotations

import torch

from stepmark.errors import UsageError

_ELEMENTWISE = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
_NOT_ELEMENTWISE = frozenset(
    {"Adafactor", "LBFGS", "Lamb", "Lars", "LAMB", "LARS", "Muon", "Shampoo", "SOAP", "SparseAdam"}
)


def check_elementwise(kind: type[torch.optim.Optimizer]) -> None:
    """Checks that an optimizer may work on flat shards of parameters.

    The optimizers of `torch.optim` are known. Any other class says so itself, with a class attribute `elementwise`.

    Raises:
        UsageError: The optimizer uses complete parameters (their norm or shape), or it is unknown whether it does.
    """
    elementwise = _is_elementwise(kind)
    if elementwise:
        return
    if elementwise is None:
        raise UsageError(
            f"zero_1: it is unknown whether {kind.__name__} updates every element independently, as ZeRO-1 needs; set "
            "the attribute `elementwise = True` in the class if it does, otherwise switch zero_1 off"
        )
    raise UsageError(
        f"zero_1: {kind.__name__} uses complete parameters, which ZeRO-1 shards; choose an elementwise optimizer such "
        "as AdamW, or switch zero_1 off"
    )


def _is_elementwise(kind: type[torch.optim.Optimizer]) -> bool | None:
    """None where that is unknown."""
    declared = getattr(kind, "elementwise", None)
    if declared is not None:
        return bool(declared)
    if any(base.__module__.startswith("bitsandbytes.") for base in kind.__mro__):
        return False  # states of 8 bits are scaled in blocks of elements
    if {base.__name__ for base in kind.__mro__} & _NOT_ELEMENTWISE:
        return False
    known = kind.__module__.startswith("torch.optim.") and kind.__name__ in _ELEMENTWISE
    return True if known else None
