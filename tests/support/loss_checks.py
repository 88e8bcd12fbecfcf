"""Compares training and evaluation losses with the mean over targets, computed by hand from a model's logits."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from stepmark.data.loader.loader import DataLoader
from stepmark.evaluation.evaluator import Evaluator
from stepmark.parallel.optimizer import replicated
from stepmark.runtime.mesh import Mesh
from stepmark.training.optimizer import wrap_optimizer
from stepmark.training.step import TrainStep
from stepmark.training.weighted_loss import MicroBatchLoss
from tests.support.label_models import Case, NotMade, make, mean_by_hand, sample_losses, task_of

BATCHES = (1, 2, 5)
ACCUMULATIONS = (1, 4)
TOLERANCE = 2e-4  # relative: batches of other sizes are added up in another order


@dataclass(frozen=True)
class Verdict:
    """The result for a class. `outcome`: equal, different, or not tried; `why` says more."""

    name: str
    task: str
    outcome: str
    why: str = ""


def verdict(name: str) -> Verdict:
    """Makes a small model of a transformers class, and compares all its losses."""
    try:
        case = make(name)
    except NotMade as reason:
        return Verdict(name, task_of(name), "not tried", str(reason))
    try:
        found = differences(case)
    except Exception as error:
        found = [f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"]
    return Verdict(name, case.task, "different" if found else "equal", "; ".join(found[:2]))


def differences(case: Case) -> list[str]:
    """The batch sizes and accumulations at which a loss, or the gradient norm, is not the one computed by hand."""
    torch.manual_seed(0)
    with torch.no_grad():
        losses, counts = zip(*(sample_losses(case, sample) for sample in case.samples), strict=True)
    found = []
    for batch in BATCHES:
        expected = float(sum(losses)) / sum(counts)
        found += _differs(f"eval_loss at batch {batch}", evaluation_loss(case, batch), expected)
        for accumulation in ACCUMULATIONS:
            size = batch * accumulation
            for number, values in enumerate(training_losses(case, batch, accumulation)):
                step = slice(number * size, (number + 1) * size)
                expected = float(sum(losses[step])) / sum(counts[step])
                found += _differs(f"loss at batch {batch}, accumulation {accumulation}", values[0], expected)
    if gradients_differ(case):
        # Float32 rounding of deep convolutions can exceed the tolerance; a mistake remains in float64, which is refused
        # in training, since gradients are added in float32: closely enough here.
        with patch.object(replicated, "check_real", lambda name, parameter: None):
            found += gradients_differ(in_float64(case))
    return list(dict.fromkeys(found))


def _differs(what: str, found: float | None, expected: float) -> list[str]:
    if found is not None and abs(found - expected) <= TOLERANCE * max(abs(expected), 1e-3):
        return []
    return [f"{what}: {'none' if found is None else format(found, '.6g')}, by hand {expected:.6g}"]


def gradients_differ(case: Case) -> list[str]:
    """The gradient norm of one step over all samples, if it is not that of the mean by hand."""
    return _differs("gradient norm", training_losses(case, 2, 4)[0][2], gradient_norm(case.model, mean_by_hand(case)))


def in_float64(case: Case) -> Case:
    """The case with the parameters and the samples in float64."""
    samples = [
        {name: value.double() if value.is_floating_point() else value for name, value in sample.items()}
        for sample in case.samples
    ]
    return replace(case, model=copy.deepcopy(case.model).double(), samples=samples)


def gradient_norm(model: nn.Module, loss: torch.Tensor) -> float:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    norms = [gradient.norm() for gradient in gradients if gradient is not None]
    return float(torch.stack(norms).norm())


def training_losses(case: Case, batch: int, accumulation: int) -> list[list[float]]:
    """Loss, targets and gradient norm of every step over the samples, in order; the weights stay."""
    mesh = Mesh.create(device="cpu")
    loss = MicroBatchLoss(case.model)
    names = {parameter: name for name, parameter in case.model.named_parameters()}
    inner = torch.optim.SGD([parameter for parameter in names if parameter.requires_grad], lr=0.0)
    optimizer = wrap_optimizer(inner, names, mesh)
    step = TrainStep(case.model, optimizer, loss, mesh, accumulation=accumulation)
    return [step(number, each).values.tolist() for number, each in enumerate(loader(case, loss, batch, accumulation))]


def evaluation_loss(case: Case, batch: int) -> float | None:
    mesh = Mesh.create(device="cpu")
    loss = MicroBatchLoss(case.model)
    return Evaluator(case.model, loss, mesh)(loader(case, loss, batch, 1)).loss


def loader(case: Case, loss: MicroBatchLoss, batch: int, accumulation: int) -> Any:
    return DataLoader(case.samples, batch, accumulation=accumulation, shuffle=False, labels=loss.labels)
