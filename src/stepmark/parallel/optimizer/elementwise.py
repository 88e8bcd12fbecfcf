"""How much of the model an optimizer needs to update one element, which says how ZeRO-1 may divide its work.

An elementwise optimizer works on flat shards of parameters. One that needs complete parameters, but each independently
of the others, works on some of the parameters, each of them whole. Any other needs all of them at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from stepmark.errors import UsageError

Unit = Literal["element", "parameter"]

_ELEMENTWISE = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
_NOT_ELEMENTWISE = frozenset(
    {"Adafactor", "LBFGS", "Lamb", "Lars", "LAMB", "LARS", "Muon", "Shampoo", "SOAP", "SparseAdam"}
)
# Full names: classes of these names elsewhere may clip by the norm of all gradients, as LAMB of timm does.
_PER_PARAMETER = frozenset(
    {
        "torch.optim.Adafactor",
        "torch.optim.Muon",
        "torch.optim._adafactor.Adafactor",
        "torch.optim._muon.Muon",
        "transformers.optimization.Adafactor",
    }
)
_BITSANDBYTES = "bitsandbytes."
_WITHOUT = {
    "zero_1": "switch zero_1 off",
    "tensor_parallel_size": "set tensor_parallel_size to 1",
    "fsdp": "leave fsdp out",
}


def sharding_unit(kind: type[torch.optim.Optimizer], field: str = "zero_1") -> Unit:
    """By what ZeRO-1 divides this optimizer's work: elements, or whole parameters. `field`: what asks for it, for the
    message.

    The optimizers of `torch.optim` and bitsandbytes are known. Any other class says so itself, with a class attribute
    `elementwise` or `per_parameter`.

    Raises:
        UsageError: The optimizer needs all parameters at once, or it is unknown what it needs.
    """
    if _is_elementwise(kind):
        return "element"
    if _is_per_parameter(kind):
        return "parameter"
    remedy = (
        "set `per_parameter = True` in the class if it updates every parameter from its own gradient and state alone, "
        f"or `elementwise = True` if it does so for every element; otherwise {_WITHOUT[field]}"
    )
    if uses_complete_parameters(kind):
        raise UsageError(f"{field}: {kind.__name__} uses complete parameters, perhaps all of them at once; {remedy}")
    raise UsageError(f"{field}: it is unknown what {kind.__name__} needs to update an element; {remedy}")


def uses_complete_parameters(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether the optimizer is known to need more of a parameter than the element that it updates, so that it must not
    see shards."""
    if _is_elementwise(kind):
        return False
    names = {base.__name__ for base in kind.__mro__}
    declared = getattr(kind, "elementwise", None) is not None
    return declared or _is_per_parameter(kind) or bool(names & _NOT_ELEMENTWISE) or _in_bitsandbytes(kind)


def updates_elements(kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> bool:
    """Whether an optimizer that uses whole parameters updates those of this group element by element: the class says so
    by a static method `elementwise_group`."""
    declared = getattr(kind, "elementwise_group", None)
    return declared is not None and bool(declared(group))


def _is_elementwise(kind: type[torch.optim.Optimizer]) -> bool:
    declared = getattr(kind, "elementwise", None)
    if declared is not None:
        return bool(declared)
    return kind.__module__.startswith("torch.optim.") and kind.__name__ in _ELEMENTWISE


def _is_per_parameter(kind: type[torch.optim.Optimizer]) -> bool:
    declared = getattr(kind, "per_parameter", None)
    if declared is not None:
        return bool(declared)
    return f"{kind.__module__}.{kind.__name__}" in _PER_PARAMETER or kind.__module__.startswith(_BITSANDBYTES)


def _in_bitsandbytes(kind: type[torch.optim.Optimizer]) -> bool:
    """Derived classes included: states of 8 bits are scaled in blocks of elements."""
    return any(base.__module__.startswith(_BITSANDBYTES) for base in kind.__mro__)
