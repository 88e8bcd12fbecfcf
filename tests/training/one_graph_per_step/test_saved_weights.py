"""What a forward pass keeps of its weights where its graph ends before the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepmark.training.one_graph_per_step import saved_weights
from stepmark.training.one_graph_per_step.saved_weights import weights_made_again
from tests.support.ranks import Ranks

HERE = "tests.training.one_graph_per_step.test_saved_weights"


class _Products(nn.Module):
    """A product with a transposed weight, one with a weight in another dtype, and one with both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(5, 5) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        first, second, third, fourth = self.weights
        hidden = torch.tanh(inputs @ first.t()).double() @ second.double()
        return (hidden @ third.double().t()).float() @ fourth


def gradients(model: nn.Module, inputs: Tensor) -> list[Tensor | None]:
    model(inputs).square().sum().backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found


def kept(model: nn.Module, inputs: Tensor) -> list[Any]:
    """What autograd saves inside `weights_made_again`."""
    found: list[Any] = []
    original = saved_weights._pack

    def spy(saved: Tensor) -> Any:
        found.append(original(saved))
        return found[-1]

    saved_weights._pack = spy
    try:
        with weights_made_again():
            model(inputs)
    finally:
        saved_weights._pack = original
    return found


def test_gradients_are_the_same() -> None:
    model, inputs = _Products(), torch.randn(3, 5)
    expected = gradients(model, inputs)
    with weights_made_again():
        loss = model(inputs).square().sum()
    loss.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert gradient is not None
        assert torch.equal(parameter.grad, gradient)


def test_weights_are_kept_as_parameters() -> None:
    model = _Products()
    parameters = {id(parameter) for parameter in model.parameters()}
    inputs = torch.randn(3, 5, requires_grad=True)
    made = [each for each in kept(model, inputs) if not isinstance(each, Tensor)]
    forms = [(torch.float32, True), (torch.float64, False), (torch.float64, True)]
    assert {each.args[1:] for each in made} == set(forms)
    assert all(id(each.args[0]) in parameters for each in made)


def weights_kept(kind: str) -> dict[str, int]:
    """Of a model on the lazy device: its projections' bytes, and the bytes of tensors of their shapes, besides
    parameters, that autograd saves in a forward pass, alone and inside `weights_made_again`."""
    from stepmark.runtime.module_placement import place_module
    from stepmark.runtime.xla import XlaRuntime
    from stepmark.training.one_graph_per_step.transformers_forward import lazy_forward
    from tests.support.models import build

    runtime, model = XlaRuntime(), build(kind, hidden_size=48)
    place_module(model, runtime)
    inputs = {"input_ids": runtime.place(torch.full((1, 8), 3))}
    matrices = [parameter for name, parameter in model.named_parameters() if "proj" in name]
    shapes = {tuple(shape) for each in matrices for shape in (each.shape, each.t().shape)}
    found = {"weights": sum(matrix.nbytes for matrix in matrices), "alone": 0, "again": 0}

    def counting(name: str, pack: Any) -> Any:
        def count(saved: Tensor) -> Tensor:
            packed = pack(saved)
            if isinstance(packed, Tensor) and not isinstance(packed, nn.Parameter) and tuple(packed.shape) in shapes:
                found[name] += packed.nbytes
            return saved

        return torch.autograd.graph.saved_tensors_hooks(count, lambda saved: saved)

    for name, pack in (("alone", lambda saved: saved), ("again", saved_weights._pack)):
        with lazy_forward(inputs), counting(name, pack):
            model(**inputs, use_cache=False)
    return found


@pytest.mark.xla
def test_no_weight_is_copied_on_a_lazy_device(ranks: Ranks) -> None:
    (found,) = ranks.run(f"{HERE}:weights_kept", "llama").check()
    assert found["alone"] >= found["weights"]
    assert found["again"] == 0
