"""ZeroRedundancyOptimizer's arguments: each has its effect, or is refused with the remedy."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stepmark import Mesh, ZeroRedundancyOptimizer
from stepmark.errors import UsageError
from tests.support.ranks import Ranks
from tests.support.zero1_programs import Net

PROGRAMS = "tests.support.zero1_programs"


def optimizer(net: nn.Module | None = None, **options: Any) -> ZeroRedundancyOptimizer:
    options = {"mesh": Mesh.create(device="cpu"), "lr": 0.01, **options}
    return ZeroRedundancyOptimizer((net or Net()).named_parameters(), torch.optim.AdamW, **options)


def trained(net: Net, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    for step in range(steps):
        net(torch.full((2, 7), 0.1 * (step + 1))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value for parameter in net.parameters() for value in parameter.detach().reshape(-1).tolist()]


# Groups


def test_a_group_that_is_added_later_is_refused() -> None:
    made, late = optimizer(), nn.Parameter(torch.ones(3))
    with pytest.raises(UsageError, match=r"add_param_group: .*not reduced; pass all groups to the constructor"):
        made.add_param_group({"params": [late]})
    assert not any(parameter is late for group in made.param_groups for parameter in group["params"])


def test_lazy_init_leaves_the_parameters_until_init_zero() -> None:
    net, expected = Net(), Net()
    pointers = [parameter.data_ptr() for parameter in net.parameters()]
    first, *others = net.named_parameters()
    made = ZeroRedundancyOptimizer(
        [{"params": [first]}], torch.optim.AdamW, lazy_init=True, mesh=Mesh.create(device="cpu"), lr=0.01
    )
    made.add_param_group({"params": others, "lr": 0.02})
    with pytest.raises(UsageError, match=r"call init_zero\(\) first"):
        made.step()
    assert [parameter.data_ptr() for parameter in net.parameters()] == pointers
    made.init_zero()
    assert [group["lr"] for group in made.param_groups] == [0.01, 0.02]
    assert [parameter.data_ptr() for parameter in net.parameters()] != pointers
    with pytest.raises(UsageError, match="init_zero: the optimizer is initialized already"):
        made.init_zero()

    first, *others = expected.named_parameters()
    eager = ZeroRedundancyOptimizer(
        [{"params": [first]}, {"params": others, "lr": 0.02}],
        torch.optim.AdamW,
        mesh=Mesh.create(device="cpu"),
        lr=0.01,
    )
    assert trained(net, made) == trained(expected, eager)


def test_a_schedule_made_before_init_zero_sets_the_rates_after_it() -> None:
    net = Net()
    made = optimizer(net, lazy_init=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
    made.init_zero()
    trained(net, made, 1)
    schedule.step()
    assert [group["lr"] for group in made.param_groups] == [0.005]


# torch_xla's arguments


@pytest.mark.xla
def test_the_arguments_are_those_of_torch_xla() -> None:
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer as Theirs

    ours = inspect.signature(ZeroRedundancyOptimizer).parameters
    for name, theirs in inspect.signature(Theirs).parameters.items():
        assert name in ours
        assert ours[name].default == theirs.default
    after = list(ours)[list(ours).index("optimizer_class") + 1 :]
    assert {ours[name].kind for name in after} == {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}


def test_further_positional_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="positional"):
        ZeroRedundancyOptimizer(Net().parameters(), torch.optim.AdamW, torch.float32)  # type: ignore[misc]


@pytest.mark.parametrize(
    "options",
    [
        {"pin_layout": False},
        {"pin_layout": True},
        {"sharding_groups": [[0]]},
        {"grad_norm_groups": [[0]]},
        {"coalesce_cc": True},
        {"save_master_weights": True},
        {"max_norm": None},
        {"optimizer_dtype": torch.float32},
        {"bucket_cap_mb_all_gather": 1, "bucket_cap_mb_reduce_scatter": 2},
        {"use_grad_acc_hook": True, "higher_cc_precision": True},
    ],
    ids=lambda options: ",".join(options),
)
def test_these_change_no_value_on_one_rank(options: dict[str, Any]) -> None:
    net, expected = Net(), Net()
    assert trained(net, optimizer(net, **options)) == trained(expected, optimizer(expected))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer_dtype": torch.bfloat16}, "optimizer_dtype: torch.bfloat16 is not supported; leave it out"),
        ({"optimizer_dtype": torch.float64}, "optimizer_dtype: torch.float64 is not supported; leave it out"),
        ({"sharding_groups": [[0, 1], [2, 3]]}, r"sharding_groups: .* data parallel groups, \[\[0\]\]; leave it out"),
        ({"grad_norm_groups": [[0, 1]]}, r"grad_norm_groups: .* tensor parallel groups, \[\[0\]\]; leave it out"),
        ({"bucket_cap_mb_all_gather": -1}, "bucket_cap_mb: -1 is below 0"),
        ({"max_norm": 0.0}, "max_norm: 0.0 is not above 0"),
    ],
)
def test_what_has_no_effect_here_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        optimizer(**options)


def test_the_norm_is_clipped_to_one_by_default_and_with_none() -> None:
    found = []
    for options in ({}, {"max_norm": None}, {"max_norm": 1.0}, {"max_norm": 0.1}, {"grad_clipping": False}):
        net = Net()
        made = ZeroRedundancyOptimizer(
            net.parameters(), torch.optim.SGD, mesh=Mesh.create(device="cpu"), lr=0.01, **options
        )
        (10 * net(torch.ones(2, 7))).backward()
        made.step()
        assert made.grad_norm is not None
        assert made.grad_norm > 1
        found.append(net.first.detach().clone())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[3])
    assert not torch.equal(found[0], found[4])


@pytest.mark.parametrize("caps", [(1, 0), (0, 1), (1, 4), (4, 1)])
def test_the_smaller_cap_limits_a_bucket(caps: tuple[int, int]) -> None:
    net = nn.Sequential(*(nn.Linear(256, 512, bias=False) for _ in range(5)))  # 0.5 MiB each
    options = {"bucket_cap_mb_all_gather": caps[0], "bucket_cap_mb_reduce_scatter": caps[1]}
    assert [bucket.numel for bucket in optimizer(net).named_optimizer.distribution.buckets] == [5 * 2**17]
    assert [bucket.numel for bucket in optimizer(net, **options).named_optimizer.distribution.buckets] == [
        2**17,
        2**18,
        2**18,
    ]


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, "torch.bfloat16"),
        ({"higher_cc_precision": True}, "torch.float32"),
        ({"use_grad_acc_hook": True}, "torch.float32"),
    ],
)
def test_the_dtype_in_which_gradients_are_sent(ranks: Ranks, options: dict[str, bool], dtype: str) -> None:
    assert ranks.run(f"{PROGRAMS}:sent_dtypes", options, nproc=2).check() == [[dtype]] * 2


def test_groups_of_ranks_that_are_the_meshs_are_accepted(ranks: Ranks) -> None:
    for accepted, refused in ranks.run(f"{PROGRAMS}:rank_groups", nproc=2).check():
        assert accepted == ["", "", ""]
        assert "sharding_groups: [[0], [1]] are not the mesh's data parallel groups, [[0, 1]]" in refused[0]
        assert "grad_norm_groups: [[0, 1]] are not the mesh's tensor parallel groups, [[0], [1]]" in refused[1]


# Parameters that the script writes between steps


@pytest.mark.parametrize(
    ("dtype", "how"),
    [
        (torch.float32, "in place"),
        (torch.float32, "state dict"),
        (torch.float32, "data"),
        (torch.float32, "new data"),
        (torch.bfloat16, "in place"),
        (torch.bfloat16, "data"),
        (torch.bfloat16, "state dict"),
        (torch.bfloat16, "new data"),
    ],
)
def test_what_the_script_writes_is_trained_further(dtype: torch.dtype, how: str) -> None:
    net, expected = Net().to(dtype), Net().to(dtype)
    for each in (net, expected):
        made = ZeroRedundancyOptimizer(
            each.named_parameters(), torch.optim.SGD, mesh=Mesh.create(device="cpu"), lr=0.1, lazy_init=True
        )
        if each is net:
            made.init_zero()
            trained_in(each, made, dtype)
        write(each, how)
        if each is expected:
            made.init_zero()
        trained_in(each, made, dtype)
    for name, value in net.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name]), name


def trained_in(net: Net, made: ZeroRedundancyOptimizer, dtype: torch.dtype) -> None:
    for step in range(2):
        net(torch.full((2, 7), 0.1 * (step + 1), dtype=dtype)).backward()
        made.step()


def write(net: nn.Module, how: str) -> None:
    """Sets all parameters to halves."""
    halves = {name: torch.full_like(value, 0.5) for name, value in net.state_dict().items()}
    if how == "state dict":
        net.load_state_dict(halves)
        return
    for name, parameter in net.named_parameters():
        if how == "in place":
            nn.init.constant_(parameter, 0.5)
        elif how == "data":
            parameter.data.fill_(0.5)
        else:
            parameter.data = halves[name]


def test_a_transposed_view_of_a_parameter_is_a_change_of_its_values() -> None:
    """It has the same memory."""
    found = []
    for sharded in (True, False):
        weight = nn.Parameter(torch.arange(9.0).reshape(3, 3))
        made: Any = torch.optim.SGD([weight], lr=0.1)
        if sharded:
            mesh = Mesh.create(device="cpu")
            made = ZeroRedundancyOptimizer([("w", weight)], torch.optim.SGD, mesh=mesh, lr=0.1, grad_clipping=False)
        for _ in range(2):
            weight.data = weight.data.t()
            (weight * torch.arange(9.0).reshape(3, 3)).sum().backward()
            made.step()
            made.zero_grad()
        found.append(weight.tolist())
    assert found[0] == found[1]


def test_what_cannot_be_sharded_is_refused_by_name() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight.data = net[0].weight.data
    with pytest.raises(UsageError, match=r"0\.weight and 1\.weight are two parameters in the same memory"):
        optimizer(net)
    with pytest.raises(UsageError, match="wave: is a parameter of torch.complex64, and grad"):
        optimizer(nn.ParameterDict({"wave": torch.ones(2, dtype=torch.complex64)}))
    with pytest.raises(UsageError, match="wave: is a parameter of torch.float64, and grad"):
        optimizer(nn.ParameterDict({"wave": torch.ones(2, dtype=torch.float64)}))


class Nesting(torch.optim.SGD):
    """Keeps a tensor inside a list."""

    elementwise = True

    def step(self, closure: Any = None) -> Any:
        for parameter in (each for group in self.param_groups for each in group["params"]):
            self.state[parameter]["moments"] = [torch.zeros_like(parameter)]
        return super().step(closure)


def test_states_of_parts_that_are_inside_others_are_refused() -> None:
    net = nn.Linear(2, 2)
    made = ZeroRedundancyOptimizer(net.named_parameters(), Nesting, mesh=Mesh.create(device="cpu"), lr=0.1)
    net(torch.ones(1, 2)).sum().backward()
    made.step()
    with pytest.raises(UsageError, match="optimizer: its state of weight has tensors inside a list, of which each ra"):
        made.named_optimizer.named_state()


@pytest.mark.parametrize("data", [False, True])
def test_masters_keep_what_rounding_hides_of_parameters_that_were_not_written(data: bool) -> None:
    net = Net().to(torch.bfloat16)
    made = ZeroRedundancyOptimizer(
        net.named_parameters(), torch.optim.SGD, mesh=Mesh.create(device="cpu"), lr=1e-5, grad_clipping=False
    )
    for _ in range(3):
        net(torch.ones(2, 7, dtype=torch.bfloat16)).backward()
        made.step()
    kept = made.named_optimizer.named_state()["first"]["master"].tensor.clone()
    assert not torch.equal(kept, kept.to(torch.bfloat16).float())
    with torch.no_grad():
        (net.scale.data if data else net.scale).fill_(2.0)
    made.param_groups[0]["lr"] = 0.0
    net(torch.ones(2, 7, dtype=torch.bfloat16)).backward()
    made.step()
    assert torch.equal(made.named_optimizer.named_state()["first"]["master"].tensor[:35], kept[:35])
    assert net.scale.item() == 2.0


def test_a_parameter_that_is_frozen_later_stays_as_it_is_and_one_that_is_unfrozen_is_refused() -> None:
    net = Net()
    net.bias.requires_grad_(False)
    made = optimizer(net)
    trained(net, made, 1)
    net.bias.requires_grad_(True)
    with pytest.raises(UsageError, match="step: a parameter that was frozen when the optimizer was made"):
        trained(net, made, 1)
    net.bias.requires_grad_(False)
    net.scale.requires_grad_(False)
    made.zero_grad()
    before = net.scale.item()
    trained(net, made, 1)
    assert net.scale.item() == before


@pytest.mark.xla
@pytest.mark.parametrize(("dtype", "sharded"), [("float32", True), ("bfloat16", True), ("bfloat16", False)])
@pytest.mark.parametrize("data", [False, True])
def test_what_the_script_writes_on_a_lazy_device_is_trained_further(
    ranks: Ranks, dtype: str, sharded: bool, data: bool
) -> None:
    (found,) = ranks.run(f"{PROGRAMS}:written_on_a_lazy_device", dtype, sharded, data).check()
    assert found["values"] == [0.5] * found["elements"]
    assert found["executions"] == [1] * 3


@pytest.mark.parametrize("name", ["Adam", "Lamb"])
def test_what_a_script_writes_to_data_is_trained_further_on_several_ranks(ranks: Ranks, name: str) -> None:
    for found in ranks.run(f"{PROGRAMS}:halved", name, nproc=2).check():
        assert found["moved"]
        assert found["weights"] == found["halves"]


# The device


def test_parameters_on_another_device_than_the_meshs_are_refused() -> None:
    with pytest.raises(UsageError, match=r"params: a parameter is on meta, and the mesh's device is cpu; move the"):
        optimizer(nn.Linear(2, 2, device="meta"))


# State dicts


def state(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: state(each, change) for key, each in value.items()}
    return [state(each, change) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_dict_restores_on_the_same_rank(dtype: torch.dtype) -> None:
    def batch(step: int) -> torch.Tensor:
        return torch.full((2, 7), 0.1 * (step + 1), dtype=dtype)

    def train(net: Net, made: ZeroRedundancyOptimizer, begin: int, end: int) -> None:
        for step in range(begin, end):
            net(batch(step)).backward()
            made.step()

    net, again = Net().to(dtype), Net().to(dtype)
    made = optimizer(net)
    train(net, made, 0, 2)
    made.param_groups[0]["lr"], made.param_groups[0]["weight_decay"] = 0.03, 0.2
    model = {name: value.clone() for name, value in net.state_dict().items()}
    saved = state(made.state_dict(), torch.Tensor.clone)
    train(net, made, 2, 4)
    restored = optimizer(again)
    again.load_state_dict(model)
    restored.load_state_dict(saved)
    train(again, restored, 2, 4)
    assert (restored.param_groups[0]["lr"], restored.param_groups[0]["weight_decay"]) == (0.03, 0.2)
    for expected, found in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(expected, found)


def test_a_state_dict_of_other_parameters_or_another_class_is_refused() -> None:
    made = optimizer()
    with pytest.raises(UsageError, match=r"state_dict: its buckets is .*stepmark.Checkpointer"):
        made.load_state_dict(optimizer(nn.Linear(2, 2)).state_dict())
    with pytest.raises(UsageError, match="state_dict: not made by ZeroRedundancyOptimizer"):
        made.load_state_dict(torch.optim.AdamW(Net().parameters()).state_dict())


def test_a_state_dict_of_another_rank_or_mesh_is_refused(ranks: Ranks) -> None:
    (alone,) = ranks.run(f"{PROGRAMS}:position").check()
    first, second = ranks.run(f"{PROGRAMS}:position", alone, nproc=2).check()
    assert re.search("state_dict: its mesh is .*stepmark.Checkpointer", first["message"])
    assert (first["position"]["rank"], second["position"]["rank"]) == (0, 1)
    messages = [each["message"] for each in ranks.run(f"{PROGRAMS}:position", first["position"], nproc=2).check()]
    assert messages[0] == ""
    assert "state_dict: its rank is 0, and here it is 1" in messages[1]


# Steps on a lazy device


@pytest.mark.xla
@pytest.mark.parametrize("hook", [False, True])
def test_step_ends_the_step_on_a_lazy_device(ranks: Ranks, hook: bool) -> None:
    (found,) = ranks.run(f"{PROGRAMS}:lazy_steps", hook).check()
    assert found["executions"] == [1] * 8
    assert found["compilations"] <= 2
    assert found["weights"] == pytest.approx(found["expected"], rel=1e-4, abs=1e-6)


@pytest.mark.xla
@pytest.mark.parametrize("nproc", [1, 2])
def test_awss_script_runs_with_the_import_changed(ranks: Ranks, nproc: int) -> None:
    found = ranks.run(f"{PROGRAMS}:accelerated", nproc=nproc).check()
    expected = ranks.run(f"{PROGRAMS}:accelerated", True).check()[0]
    for each in found:
        assert each == pytest.approx(expected, rel=1e-4, abs=1e-6)
