"""What waits for a parameter whose values are on their way, and what does not."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from stepmark.parallel.optimizer.pending_gathers import PendingGathers, PendingParameter, of_known_libraries

MADE: list[PendingGathers] = []


@pytest.fixture(autouse=True)
def nothing_is_left_on_its_way() -> Iterator[None]:
    """The hook of all modules is gone before other tests run."""
    yield
    while MADE:
        MADE.pop().wait()


def on_its_way(*shape: int) -> tuple[nn.Parameter, PendingGathers, list[int]]:
    """A parameter of NaN that becomes one of ones, and a list that gets a number when somebody has waited."""
    parameter = nn.Parameter(torch.full(shape or (2, 2), torch.nan))
    waited: list[int] = []

    def finish() -> None:
        waited.append(1)
        parameter.data.fill_(1.0)

    gathers = PendingGathers([[parameter]])
    MADE.append(gathers)
    gathers.defer = gathers._trial.over = True
    gathers.start({0: finish})
    gathers.watch()
    assert gathers._pending
    return parameter, gathers, waited


def _saved(parameter: nn.Parameter) -> Any:
    torch.save({"nested": [{"weight": parameter}]}, file := io.BytesIO())
    file.seek(0)
    return torch.load(file)["nested"][0]["weight"]


def _in_a_thread(parameter: nn.Parameter) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(parameter.sum() / 4))
    thread.start()
    thread.join()
    return found[0]


def _in_a_module(parameter: nn.Parameter) -> Any:
    module = nn.Module()
    module.weight = parameter
    return module.state_dict()["weight"]


USES: dict[str, Callable[[nn.Parameter], Any]] = {
    "operator": lambda p: p * 1.0,
    "reflected operator": lambda p: 1.0 * p,
    "product": lambda p: torch.eye(2) @ p,
    "item": lambda p: p[0, 0],
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy()),
    "tolist": lambda p: torch.tensor(p.tolist()),
    "list": lambda p: torch.cat([torch.ones(2, 2), p]),
    "nested": lambda p: torch.block_diag(*[p]).sum() / 4,
    "foreach": lambda p: torch._foreach_mul([p.detach()], 1.0)[0],
    "linear": lambda p: functional.linear(torch.ones(1, 2), weight=p) / 2,
    "in place": lambda p: torch.ones(2, 2).copy_(p),
    "own copy": copy.deepcopy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "save": _saved,
    "state dict": _in_a_module,
    "memory": lambda p: torch.tensor(p.untyped_storage().tolist(), dtype=torch.uint8).view(torch.float32),
    "class": lambda p: type(p)(p.data),
    "address": lambda p: torch.ones(1) if p.data_ptr() else None,
    "compared": lambda p: torch.equal(p, torch.ones(2, 2)) * torch.ones(1),
    "thread": _in_a_thread,
}


@pytest.mark.parametrize("name", USES)
def test_a_use_waits(name: str) -> None:
    parameter, gathers, waited = on_its_way()
    found = USES[name](parameter)
    assert waited == [1]
    assert bool((found == 1.0).all())
    assert type(found) is not PendingParameter
    assert type(parameter) is nn.Parameter
    assert not gathers._pending


def test_printing_waits() -> None:
    parameter, _, waited = on_its_way()
    assert "nan" not in repr(parameter)
    assert waited == [1]


def test_calling_a_module_waits_for_its_own_parameters() -> None:
    class Kernel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, _, self.waited = on_its_way()

        def forward(self) -> list[int]:
            return list(self.waited)

    assert Kernel()() == [1]


def test_a_module_that_is_given_what_was_made_of_parameters_waits_for_all() -> None:
    """torch.func hides parameters in tensors of its own; a module shows that it was given such ones."""
    module = nn.Linear(2, 2, bias=False)
    module.weight, _, waited = on_its_way()

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(module, parameters, (torch.ones(1, 2),)).sum()

    gradient = torch.func.grad(loss)({"weight": module.weight})["weight"]
    assert waited == [1]
    assert gradient.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_only_models_of_libraries_are_known() -> None:
    class Own(GPT2LMHeadModel):
        pass

    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=8, n_positions=8)
    assert of_known_libraries(GPT2LMHeadModel(config))
    assert of_known_libraries(nn.Sequential(nn.Linear(2, 2)))
    assert not of_known_libraries(Own(config))
    assert not of_known_libraries(nn.Sequential(Own(config)))


def test_what_is_known_without_values_does_not_wait() -> None:
    parameter, gathers, waited = on_its_way(3, 4)
    assert parameter.shape == (3, 4) == parameter.size()
    assert (parameter.dim(), parameter.numel(), len(parameter), parameter.ndim) == (2, 12, 3, 2)
    assert parameter.dtype == torch.float32 and parameter.is_floating_point() and torch.is_floating_point(parameter)  # noqa: PT018
    assert parameter.device.type == "cpu"
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert {parameter: 1}[parameter] == 1
    assert isinstance(parameter, nn.Parameter)
    parameter.grad = torch.ones(3, 4)
    assert parameter.grad is not None
    parameter.grad = None
    parameter.requires_grad = True
    assert waited == []
    assert type(parameter) is PendingParameter
    gathers.wait()
    assert waited == [1]


def test_a_failure_is_raised_where_the_values_are_used() -> None:
    parameter = nn.Parameter(torch.zeros(1))

    def finish() -> None:
        raise ConnectionError("the other rank has gone")

    gathers = PendingGathers([[parameter]])
    gathers.defer = gathers._trial.over = True
    gathers.start({0: finish})
    gathers.watch()
    for _ in range(2):  # not only the first time
        with pytest.raises(ConnectionError, match="has gone"):
            parameter + 1
    gathers._pending = {0: lambda: None}  # so that later tests find nothing on its way
    gathers.wait()


def test_parameters_of_a_class_of_their_own_are_waited_for_at_once() -> None:
    class Special(nn.Parameter):
        pass

    waited: list[int] = []
    gathers = PendingGathers([[Special(torch.zeros(1))]])
    gathers.defer = gathers._trial.over = True
    gathers.start({0: lambda: waited.append(1)})
    gathers.watch()
    assert waited == [1]


def test_without_leave_to_defer_nothing_is_left_on_its_way() -> None:
    waited: list[int] = []
    gathers = PendingGathers([[nn.Parameter(torch.zeros(1))]])
    gathers.start({0: lambda: waited.append(1)})
    assert waited == [1]
