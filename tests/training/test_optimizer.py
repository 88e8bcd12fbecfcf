"""Optimizers: the lazy ones against torch's, master weights, weight decay, and state by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, Trainer

from stepmark.errors import UsageError
from stepmark.optim.lazy_optimizers import LazyAdamW, LazySGD
from stepmark.runtime.eager import EagerRuntime
from stepmark.training.optimizer import MASTER, ParameterOptimizer, build_optimizer, decays_by_default

CPU = EagerRuntime(torch.device("cpu"))
STEPS = 50
SHAPES = [(7, 5), (5,), (), (3, 2, 2)]


def parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def rate(step: int) -> float:
    """Rises, falls, and is exactly 0 for a while."""
    return max(0.0, 1e-2 * min(step + 1, 35 - step) / 20)


def walk(make: Callable[..., torch.optim.Optimizer], options: dict[str, Any]) -> list[Tensor]:
    """Parameters after STEPS steps with the same gradients and rates; one row never has a gradient but zero, and one
    parameter has none in every third step."""
    worked_on = parameters()
    groups = [{"params": worked_on[:2], "weight_decay": 0.1}, {"params": worked_on[2:], "weight_decay": 0.0}]
    optimizer = make(groups, lr=rate(0), **options)
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        for index, parameter in enumerate(worked_on):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            if index == 0:
                parameter.grad[3] = 0.0
            if index == 3 and step % 3 == 0:
                parameter.grad = None
        optimizer.step()
    return [parameter.detach() for parameter in worked_on]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"amsgrad": True},
        {"betas": (0.5, 0.9), "eps": 1e-3},
        {"maximize": True},
        {"betas": (0.0, 0.99)},
    ],
)
def test_lazy_adamw_is_torchs(options: dict[str, Any]) -> None:
    assert rate(35) == rate(STEPS - 1) == 0.0
    for mine, theirs in zip(walk(LazyAdamW, options), walk(torch.optim.AdamW, options), strict=True):
        assert torch.isfinite(mine).all()
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.5, "maximize": True}]
)
def test_lazy_sgd_is_torchs(options: dict[str, Any]) -> None:
    for mine, theirs in zip(walk(LazySGD, options), walk(torch.optim.SGD, options), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(("lazy", "torchs"), [(LazyAdamW, torch.optim.AdamW), (LazySGD, torch.optim.SGD)])
def test_lazy_states_are_torchs_and_there_from_the_start(lazy: Any, torchs: Any) -> None:
    options = {"amsgrad": True} if lazy is LazyAdamW else {"momentum": 0.9}
    (mine,), (theirs,) = parameters()[:1], parameters()[:1]
    first, second = lazy([mine], lr=0.1, **options), torchs([theirs], lr=0.1, **options)
    before = dict(first.state[mine])
    mine.grad = theirs.grad = torch.ones(SHAPES[0])
    first.step()
    second.step()
    assert before.keys() == first.state[mine].keys() == second.state[theirs].keys()
    for key, value in second.state[theirs].items():
        assert first.state[mine][key] is before[key], "a state was replaced"
        torch.testing.assert_close(first.state[mine][key], value)


def test_long_after_the_start_the_bias_corrections_are_gone() -> None:
    ends = []
    for make in (LazyAdamW, torch.optim.AdamW):
        (parameter,) = parameters()[:1]
        optimizer = make([parameter], lr=1e-3)
        parameter.grad = torch.ones(SHAPES[0])
        optimizer.step()
        optimizer.state[parameter]["step"].fill_(20000.0)
        optimizer.step()
        ends.append(parameter.detach())
    torch.testing.assert_close(ends[0], ends[1])


def test_lazy_sgd_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="dampening"):
        LazySGD(parameters(), lr=0.1, momentum=0.9, dampening=0.5)


# Master weights


def bf16_optimizer(name: str, **options: Any) -> tuple[nn.Linear, ParameterOptimizer]:
    torch.manual_seed(0)
    module = nn.Linear(8, 8).to(torch.bfloat16)
    return module, build_optimizer(name, list(module.named_parameters()), CPU, options=options, learning_rate=1e-3)


def test_updates_too_small_for_bf16_add_up_in_the_master_weights() -> None:
    module, optimizer = bf16_optimizer("sgd")
    start = module.weight.detach().float().clone()
    tiny = torch.full((8, 8), 1e-2)  # a step of 1e-5: below bf16's spacing of about 4e-3 near 1
    for step in range(2000):
        optimizer.set_gradients([tiny, None])
        optimizer.step()
        if step == 0:
            largest = start.abs() > 0.2
            assert torch.equal(module.weight.detach().float()[largest], start[largest])
    torch.testing.assert_close(module.weight.detach().float(), start - 2e-2, rtol=1e-2, atol=1e-3)
    master = optimizer.named_state()["weight"][MASTER]
    assert master.dtype == torch.float32
    torch.testing.assert_close(master, start - 2e-2, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused", "sgd"])
def test_bf16_parameters_are_their_masters_rounded(name: str) -> None:
    module, optimizer = bf16_optimizer(name)
    kept = list(module.parameters())
    for _ in range(3):
        optimizer.set_gradients([torch.randn(8, 8), torch.randn(8).to(torch.bfloat16)])
        optimizer.step()
    state = optimizer.named_state()
    for key, parameter in module.named_parameters():
        assert any(parameter is each for each in kept)
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter.detach(), state[key][MASTER].to(torch.bfloat16))
        states = [value for value in state[key].values() if isinstance(value, Tensor) and value.dim()]
        assert all(value.dtype == torch.float32 for value in states)


def test_fp32_parameters_have_no_copy() -> None:
    module = nn.Linear(2, 2)
    optimizer = build_optimizer("adamw_torch", list(module.named_parameters()), CPU)
    assert [group["params"][0] is module.weight for group in optimizer.param_groups] == [True]
    assert MASTER not in optimizer.named_state()["weight"]


# Building


def test_decay_goes_to_the_names_that_are_accepted() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    module[0].bias.requires_grad = False
    optimizer = build_optimizer(
        "adamw_torch", list(module.named_parameters()), CPU, decay=decays_by_default(module), weight_decay=0.3
    )
    decays = {name: group["weight_decay"] for group in optimizer.named_groups() for name in group["params"]}
    assert decays == {"0.weight": 0.3, "1.weight": 0.0, "1.bias": 0.0}


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "gpt_neox", "bert", "gemma3_text", "olmo2", "mixtral"])
def test_decay_by_default_is_that_of_transformers(name: str) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    more = {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "vocab_size": 32, "pad_token_id": None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes, **more, is_decoder=True))
    decays = decays_by_default(model)
    ours = {key for key, _ in model.named_parameters() if decays(key)}
    theirs = set(Trainer.get_decay_parameter_names(None, model))
    assert ours == theirs & {key for key, _ in model.named_parameters()}
    assert ours
    assert len(ours) < len(list(model.named_parameters()))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("adafactor", {}, "optim: 'adafactor' is not supported; choose one of adamw_torch"),
        ("sgd", {"momentun": 0.9}, "optim_args: sgd refuses {'momentun': 0.9}: .*momentun"),
        ("sgd", {"nesterov": True}, "optim_args: sgd refuses .*Nesterov"),
        ("adamw_torch", {"foreach": True, "fused": True}, "optim_args: adamw_torch refuses"),
    ],
)
def test_names_and_options_that_do_not_fit(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build_optimizer(name, list(nn.Linear(2, 2).named_parameters()), CPU, options=options)


def test_options_reach_the_optimizer() -> None:
    named = list(nn.Linear(2, 2).named_parameters())
    sgd = build_optimizer("sgd", named, CPU, options={"momentum": 0.9, "nesterov": True}, learning_rate=0.5)
    assert isinstance(sgd.inner, torch.optim.SGD)
    (group,) = sgd.param_groups
    assert (group["momentum"], group["nesterov"], group["lr"]) == (0.9, True, 0.5)
    adamw = build_optimizer("adamw_torch_fused", named, CPU, betas=(0.1, 0.2), epsilon=1e-3)
    (group,) = adamw.param_groups
    assert (group["betas"], group["eps"], group["fused"]) == ((0.1, 0.2), 1e-3, True)


def test_around_an_optimizer_of_the_users() -> None:
    module = nn.Linear(2, 2)
    names = {parameter: name for name, parameter in module.named_parameters()}
    given = torch.optim.RMSprop([{"params": [module.bias]}, {"params": [module.weight], "lr": 0.5}])
    optimizer = ParameterOptimizer.around(given, names, CPU)
    assert optimizer.inner is given
    assert optimizer.names == ["weight", "bias"]  # the model's order, whatever the groups' is
    optimizer.set_gradients([torch.ones(2, 2), torch.ones(2)])
    optimizer.step()
    assert set(optimizer.named_state()["weight"]) == {"step", "square_avg"}
    with pytest.raises(UsageError, match="a parameter that the model does not have"):
        ParameterOptimizer.around(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), names, CPU)


# State


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_can_be_made_before_the_first_step(name: str, dtype: torch.dtype) -> None:
    module = nn.Linear(3, 3).to(dtype)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    options = {"momentum": 0.9} if name == "sgd" else {}
    optimizer = build_optimizer(
        name, list(module.named_parameters()), CPU, options=options, weight_decay=0.1, learning_rate=0.1
    )
    optimizer.ensure_state()
    made = {key: set(state) for key, state in optimizer.named_state().items()}
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
    assert [group["lr"] for group in optimizer.param_groups] == [0.1]
    assert module.weight.grad is None
    objects = {key: dict(state) for key, state in optimizer.named_state().items()}
    optimizer.ensure_state()
    optimizer.set_gradients([torch.ones(3, 3), torch.ones(3)])
    optimizer.step()
    assert {key: set(state) for key, state in optimizer.named_state().items()} == made
    for key, state in optimizer.named_state().items():
        held = [part for part in state if part != MASTER and state[part] is not None]
        assert held
        assert all(objects[key][part] is state[part] for part in held)
