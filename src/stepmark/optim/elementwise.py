"""Which optimizers may work on a part of the parameters, laid flat: those that treat every element by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stepmark.errors import UsageError

ELEMENTWISE = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
WHOLE = frozenset({"Adafactor", "LBFGS", "Lamb", "Lars", "LAMB", "LARS", "Muon", "Shampoo", "SOAP", "SparseAdam"})
_SHAPES = ((4, 3), (6,), (2, 5))
_STEPS = 3

_probed: dict[type, bool] = {}


def check_elementwise(kind: type[torch.optim.Optimizer], arguments: dict[str, Any] | None = None) -> None:
    """Raises UsageError, by name, where an optimizer looks at whole parameters.

    torch's own are known. A class of the user's says `elementwise = True` (or False), or is tried once: a few steps on
    small tensors, whole against laid flat and cut in two.
    """
    declared = getattr(kind, "elementwise", None)
    if declared is None:
        names = {base.__name__ for base in kind.__mro__}
        if names & ELEMENTWISE and any(base.__module__.startswith("torch.optim") for base in kind.__mro__[:-1]):
            declared = True if kind.__module__.startswith(("torch.optim", "stepmark.")) else None
        if names & WHOLE:
            declared = False
    if declared is None:
        declared = _probe(kind, arguments or {})
    if not declared:
        raise UsageError(
            f"zero_1: {kind.__name__} looks at whole parameters, which ZeRO-1 cuts; choose an elementwise optimizer "
            "such as AdamW, set zero_1 to false, or declare `elementwise = True` in the class if it is one"
        )


def _probe(kind: type[torch.optim.Optimizer], arguments: dict[str, Any]) -> bool:
    if kind not in _probed:
        with torch.random.fork_rng(devices=[]):
            _probed[kind] = _same_whole_and_cut(lambda parameters: kind(parameters, **arguments))
    return _probed[kind]


def _same_whole_and_cut(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> bool:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in _SHAPES]
    gradients = [[torch.randn(shape, generator=generator) for shape in _SHAPES] for _ in range(_STEPS)]
    whole = _train(make, values, gradients)
    flat = torch.cat([value.reshape(-1) for value in values])
    half = flat.numel() // 2
    flat_gradients = [torch.cat([g.reshape(-1) for g in each]) for each in gradients]
    cut = _train(make, [flat[:half], flat[half:]], [[g[:half], g[half:]] for g in flat_gradients])
    return torch.equal(torch.cat([value.reshape(-1) for value in whole]), torch.cat(cut))


def _train(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    values: list[torch.Tensor],
    gradients: list[list[torch.Tensor]],
) -> list[torch.Tensor]:
    parameters = [nn.Parameter(value.clone()) for value in values]
    optimizer = make(parameters)
    for each in gradients:
        for parameter, gradient in zip(parameters, each, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]
