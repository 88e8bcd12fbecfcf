"""Gradients that are summed in buckets on an eager device: what a loop may do to `parameter.grad` meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepmark import ZeroRedundancyOptimizer
from stepmark.errors import UsageError
from stepmark.parallel.buckets import make_buckets
from stepmark.parallel.gradients.accumulators import BucketAccumulator, ParameterAccumulator
from stepmark.runtime.mesh import Mesh


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.arange(6.0).reshape(2, 3).to(dtype))
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=dtype))
        self.unused = nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self.first.float() * x).sum() * self.scale.float()


def sums_of(net: Net, seen: list[int] | None = None) -> BucketAccumulator:
    buckets = make_buckets([list(net.named_parameters())], Mesh.create(device="cpu"))
    sums = BucketAccumulator(buckets, Mesh.create(device="cpu").runtime)
    sums.arrived = lambda number, _: (seen if seen is not None else []).append(number)
    return sums


def found(sums: BucketAccumulator) -> list[float]:
    return sums.complete(0).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("passes", [1, 3])
def test_sums_are_those_of_autograd(dtype: torch.dtype, passes: int) -> None:
    net, plain, seen = Net(dtype), Net(dtype).float(), []
    sums = sums_of(net, seen)
    for _ in range(2):  # the second time nothing of the first is left
        sums.reset()
        plain.zero_grad()
        for number in range(passes):
            x = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, float(number)]])
            net(x).backward()
            plain(x).backward()
            sums.collect()
        assert plain.first.grad is not None
        assert plain.scale.grad is not None
        assert found(sums) == [*plain.first.grad.flatten().tolist(), plain.scale.grad.item(), 0.0, 0.0, 0.0]
    assert len(seen) == 2 * 2 * passes


def test_a_parameter_that_takes_part_in_some_passes_only_keeps_its_sum() -> None:
    net = Net()
    sums = sums_of(net)
    net(torch.ones(2, 3)).backward()
    sums.collect()
    (net.unused * 5).sum().backward()
    sums.collect()
    assert found(sums) == [2.0] * 6 + [15.0] + [5.0] * 3


def test_what_the_loop_does_to_gradients_counts() -> None:
    net = Net()
    sums = sums_of(net)
    net(torch.ones(2, 3)).backward()
    assert net.first.grad is not None
    net.first.grad.mul_(10)  # clipped or scaled by hand
    net.scale.grad = None  # cleared
    net.unused.grad = torch.full((3,), 7.0)  # assigned
    sums.collect()
    assert found(sums) == [20.0] * 6 + [0.0] + [7.0] * 3
    sums.reset()
    assert all(parameter.grad is None for parameter in net.parameters())


def test_gradients_that_are_cleared_between_passes_do_not_count() -> None:
    net = Net()
    sums = sums_of(net)
    net(torch.full((2, 3), 3.0)).backward()
    sums.collect()
    net.zero_grad()
    net(torch.ones(2, 3)).backward()
    sums.collect()
    assert found(sums) == [2.0] * 6 + [15.0] + [0.0] * 3


def test_sparse_gradients_are_added() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    buckets = make_buckets([list(table.named_parameters())], Mesh.create(device="cpu"))
    sums = BucketAccumulator(buckets, Mesh.create(device="cpu").runtime)
    for _ in range(2):
        table(torch.tensor([1, 1, 3])).sum().backward()
    assert sums.complete(0).tolist() == [0.0, 0.0, 4.0, 4.0, 0.0, 0.0, 2.0, 2.0]
    alone = ParameterAccumulator([table.weight], Mesh.create(device="cpu").runtime, accumulation=2)
    table.weight.grad = None
    for _ in range(2):
        table(torch.tensor([1, 1, 3])).sum().backward()
        alone.collect()
    assert [each.tolist() for each in alone.tensors() if each is not None] == [[[0, 0], [4, 4], [0, 0], [2, 2]]]


@pytest.fixture
def without_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_garbage_collection")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [True, False])
def test_the_last_optimizer_of_a_model_gets_its_gradients(dtype: torch.dtype, kept: bool) -> None:
    """Also where nothing has collected the one before it."""
    net, seen = Net(dtype), []
    before = [sums_of(net, seen)] if kept else []
    if not kept:
        sums_of(net, seen)
    sums = sums_of(net)
    for _ in range(2):
        net(torch.ones(2, 3)).backward()
    sums.collect()
    assert found(sums) == [4.0] * 6 + [30.0] + [0.0] * 3
    assert not seen
    assert len(net.first._post_accumulate_grad_hooks) == 1  # type: ignore[arg-type]
    sums.hooks.check()
    for each in before:
        each.reset()  # which leaves the gradients of the other one
        with pytest.raises(UsageError, match="another optimizer was made over parameters of this one"):
            each.hooks.check()
    sums.collect()
    assert found(sums) == [4.0] * 6 + [30.0] + [0.0] * 3


@pytest.mark.usefixtures("without_garbage_collection")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_gone_leaves_gradients_to_autograd(dtype: torch.dtype) -> None:
    """An optimizer that was dropped, and a reducer that was closed."""
    mesh = Mesh.create(device="cpu")
    for drop in (True, False):
        net = Net(dtype)
        optimizer: Any = ZeroRedundancyOptimizer(net.named_parameters(), torch.optim.SGD, mesh=mesh, lr=0.1)
        net(torch.ones(2, 3)).backward()
        optimizer.step()
        if drop:
            del optimizer
        else:
            optimizer._initialized()[1].close()
        net(torch.ones(2, 3)).backward()
        assert net.first.grad is not None
        assert net.first.grad.dtype == dtype


def test_hooks_that_are_registered_later_come_first() -> None:
    net = Net()
    sums = sums_of(net)

    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    net.first.register_post_accumulate_grad_hook(halve)
    sums.reset()
    net(torch.ones(2, 3)).backward()
    assert found(sums)[:6] == [1.0] * 6


def test_what_is_between_parameters_does_not_stay_nan() -> None:
    """A step whose norm is nan scales all of a bucket by nan."""
    mesh = Mesh.create(device="cpu", data_parallel_replicas=2)
    sums = BucketAccumulator(make_buckets([list(Net().named_parameters())], mesh), mesh.runtime, mesh.ranks)
    for flat in sums.flat:
        flat.mul_(float("nan"))
    sums.reset()
    assert all(torch.equal(sums.complete(number), torch.zeros_like(flat)) for number, flat in enumerate(sums.flat))


def test_logical_ranks_have_sums_of_their_own() -> None:
    mesh, net = Mesh.create(device="cpu", data_parallel_replicas=2), Net()
    sums = BucketAccumulator(make_buckets([list(net.named_parameters())], mesh), mesh.runtime, mesh.ranks)
    sums.reset()
    net(torch.ones(2, 3)).backward()
    assert net.first.grad is not None
    assert [each is not None for each in sums.tensors()] == [True, True, False]
    sums.end_rank()
    assert net.first.grad is None
    assert sums.tensors() == [None, None, None]
    (net.unused.sum() + net.first.sum()).backward()
    assert sums.got() == [True, True, True]  # of one or the other
    (root,) = sums.roots(0)
    assert root[:6].tolist() == [3.0] * 6
    assert root[64].item() == 15.0
    assert root[128:131].tolist() == [1.0] * 3
