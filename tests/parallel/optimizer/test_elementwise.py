"""Which optimizers ZeRO-1 accepts."""

from __future__ import annotations

import pytest
import torch
from transformers.optimization import Adafactor

from stepmark.errors import UsageError
from stepmark.parallel.optimizer.distribute import sharding_unit
from stepmark.parallel.optimizer.own_classes import LazyAdamW, LazySGD

ACCEPTED = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
WHOLE = ["Adafactor", "Muon"]
REFUSED = ["LBFGS", "SparseAdam"]


def subclass(name: str, base: type[torch.optim.Optimizer], **attributes: object) -> type[torch.optim.Optimizer]:
    return type(name, (base,), attributes)


def test_every_optimizer_of_torch_is_known() -> None:
    classes = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name != "Optimizer"
    }
    assert classes == {*ACCEPTED, *WHOLE, *REFUSED}


@pytest.mark.parametrize(
    "kind",
    [
        *(getattr(torch.optim, name) for name in ACCEPTED),
        LazyAdamW,
        LazySGD,
        subclass("Mine", torch.optim.Optimizer, elementwise=True),
        subclass("Lamb", torch.optim.Adam, elementwise=True),
    ],
)
def test_elementwise_optimizers_are_accepted(kind: type[torch.optim.Optimizer]) -> None:
    assert sharding_unit(kind) == "element"


@pytest.mark.parametrize(
    "kind",
    [
        *(getattr(torch.optim, name) for name in WHOLE),
        Adafactor,
        subclass("Lamb", torch.optim.Adam, per_parameter=True),
        subclass("Mine", torch.optim.Optimizer, per_parameter=True),
    ],
)
def test_those_that_use_each_parameter_alone_get_whole_ones(kind: type[torch.optim.Optimizer]) -> None:
    assert sharding_unit(kind) == "parameter"


@pytest.mark.parametrize(
    "kind",
    [
        *(getattr(torch.optim, name) for name in REFUSED),
        subclass("Derived", torch.optim.Muon),
        subclass("Lamb", torch.optim.Adam),
        subclass("Mine", torch.optim.AdamW, elementwise=False),
    ],
)
def test_others_are_refused_by_name(kind: type[torch.optim.Optimizer]) -> None:
    with pytest.raises(UsageError, match=f"zero_1: {kind.__name__} uses complete parameters"):
        sharding_unit(kind)


@pytest.mark.parametrize("base", [torch.optim.Optimizer, torch.optim.AdamW])
def test_unknown_classes_are_refused_with_the_remedy(base: type[torch.optim.Optimizer]) -> None:
    with pytest.raises(UsageError, match="unknown what Mine needs .* `per_parameter = True` .* `elementwise = True`"):
        sharding_unit(subclass("Mine", base))
