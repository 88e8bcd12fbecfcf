"""What the passes of a model change in it, where there are several logical ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stepmark import Mesh
from stepmark.errors import UsageError
from stepmark.runtime.context import Context
from stepmark.runtime.module_placement import place_module
from stepmark.training import rank_buffers
from stepmark.training.rank_buffers import RankBuffers
from tests.support.native import DEVICE
from tests.support.ranks import Ranks
from tests.support.replica_threads import replica_environment, run_replicas


def test_ranks_begin_with_the_same_and_the_first_ones_stay() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False))
    buffers = RankBuffers(model, Mesh.create(device="cpu", data_parallel_replicas=3))
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None
    for step in range(3):
        begun = norm.running_mean.clone()
        buffers.begin()
        ends = []
        for rank in range(3):
            if rank:
                buffers.enter(rank)
            assert torch.equal(norm.running_mean, begun)
            model(torch.randn(8, 3, generator=torch.Generator().manual_seed(10 * step + rank)))
            ends.append(norm.running_mean.clone())
        buffers.end()
        assert not torch.equal(ends[0], ends[1])
        assert torch.equal(norm.running_mean, ends[0])
        assert norm.num_batches_tracked == step + 1


def test_a_rank_counts_its_own_passes_in_numbers_of_modules() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.0))
    model.passes = model[1].passes = 0
    buffers, seen = RankBuffers(model, Mesh.create(device="cpu", data_parallel_replicas=3)), []
    for _ in range(3):
        buffers.begin()
        for rank in range(3):
            buffers.enter(rank)
            model.passes += 1
            model[1].passes -= 1
            model[1].p += 0.125
            seen.append((model.passes, model[1].passes, model[1].p))
        buffers.end()
    assert seen == [(step, -step, 0.125 * step) for step in (1, 2, 3) for _ in range(3)]


def test_a_pipeline_stage_may_have_no_buffers(ranks: Ranks) -> None:
    assert ranks.run(of_stage, nproc=4, timeout=60).check() == [1.0, 1.0, None, None]


def of_stage() -> float | None:
    """The buffer of the first stage after a step, in which each rank has added its number plus 1."""
    mesh = Mesh.create(device="cpu", pipeline_parallel_size=2)
    model = nn.Linear(2, 2)
    if mesh.pipeline.rank == 0:
        model.register_buffer("count", torch.zeros(()))
    buffers = RankBuffers(model, mesh)
    buffers.begin()
    for buffer in model.buffers():
        buffer.add_(mesh.data_parallel.rank + 1)
    buffers.end()
    return next((float(buffer) for buffer in model.buffers()), None)


def add(model: nn.Module, value: float) -> None:
    for buffer in model.buffers():
        buffer.add_(value)


def replace_buffer(model: nn.Module, value: float) -> None:
    for name, buffer in dict(model.named_buffers()).items():
        setattr(model, name, buffer + value)


def write(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def replace_parameter(model: nn.Module, value: float) -> None:
    for name, parameter in dict(model.named_parameters()).items():
        setattr(model, name, nn.Parameter(torch.full_like(parameter, value)))


def write_data(model: nn.Module, value: float) -> None:
    """Which torch does not count."""
    for parameter in model.parameters():
        parameter.data.fill_(value)


def assign_data(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        parameter.data = torch.full_like(parameter, value)


CHANGES: dict[str, Callable[[nn.Module, float], None]] = {
    each.__name__: each for each in (add, replace_buffer, write, assign_data, replace_parameter, write_data)
}


def counting() -> nn.Module:
    model = nn.Linear(1, 1).requires_grad_(False)
    model.register_buffer("count", torch.zeros(2))
    return model


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", CHANGES)
def test_whatever_a_pass_changes_is_as_on_the_first_rank(ranks: Ranks, name: str, first: int) -> None:
    """Parameters too, of which each process may have written others; each rank then needs its own. Where that begins
    later, it is told."""
    found = ranks.run(changed, name, "cpu", first, nproc=2, timeout=60).check()
    of_parameter = name not in ("add", "replace_buffer")
    if first:
        is_told = of_parameter and name != "write_data"  # of which no later step would say
        assert [each[1] for each in found] == [
            [f"the parameter {name} is written to" for name in ("bias", "weight")] if is_told else []
        ] * 2
        assert (found[0][0] == found[1][0]) == (not of_parameter)
        return
    assert found[0] == found[1]
    model, mesh = counting(), Mesh.create(device="cpu", data_parallel_replicas=2)
    buffers = RankBuffers(model, mesh)
    buffers.begin()
    CHANGES[name](model, 1.0)
    if of_parameter:
        with pytest.raises(UsageError, match=r"^data_parallel_replicas: the parameter weight is written to in the"):
            buffers.enter(1)
        return
    buffers.enter(1)
    assert model.count.tolist() == [0.0, 0.0]
    CHANGES[name](model, 5.0)
    buffers.end()
    assert model.count.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("first", [0, 1])
def test_large_buffers_of_many_are_sent_where_the_first_step_changes_them(ranks: Ranks, first: int) -> None:
    found = ranks.run(changed, "add", "cpu", first, 0, nproc=2, timeout=60).check()
    assert [each[1] for each in found] == [["the large buffer count is written to"] if first else []] * 2
    assert (found[0][0] == found[1][0]) == (not first)


def test_so_it_is_on_devices(native_ranks: Ranks) -> None:
    found = native_ranks.run(changed, "replace_buffer", DEVICE, nproc=2, timeout=60).check()
    assert found[0] == found[1]


@pytest.mark.xla
@pytest.mark.parametrize("where", ["xla", "threads"])
def test_so_it_is_on_lazy_devices_whose_graphs_stay_the_same(ranks: Ranks, where: str) -> None:
    if where == "xla":
        found = ranks.run(on_lazy, nproc=2, timeout=60).check()
    else:
        (found,) = ranks.run(in_threads, environment=replica_environment(2), timeout=60).check()
    assert found[0] == found[1] == [[11.0, 0.0], [1, 0], [False, True], [11.0, 0.0]]


def on_lazy(context: Context | None = None) -> list[list[float]]:
    """The buffers of a model after two steps, of which graphs of the last one are compiled for none."""
    mesh = Mesh.create(device="xla", context=context)
    model, rank, runtime = nn.Linear(1, 1), mesh.data_parallel.rank, mesh.runtime
    for name, dtype in (("a", torch.float32), ("b", torch.int64), ("c", torch.bool), ("d", torch.bfloat16)):
        model.register_buffer(name, torch.zeros(2, dtype=dtype))
    place_module(model, runtime)
    buffers, graphs = RankBuffers(model, mesh), []
    for step in range(4):
        drawn = [*map(runtime.numbers, ([10.0 * min(step, 1) + rank + 1, rank], [1 - rank, rank], [rank, 1 - rank]))]
        buffers.begin()
        for name, number in zip("abcd", [0, 1, 2, 0], strict=True):
            buffer = model._buffers[name]
            buffer.copy_(drawn[number].to(buffer.dtype))
        buffers.end()
        runtime.step_boundary()
        counters = runtime.counters()
        graphs.append(counters.compilations if counters is not None else 0)
    assert graphs[-1] == graphs[1] or mesh.data_parallel.size == 1, graphs
    return [each.tolist() for each in runtime.to_host([*model.buffers()])]


def in_threads() -> list[Any]:
    return run_replicas(on_lazy, 2)


def changed(
    name: str, device: str = "cpu", first: int = 0, total: int = rank_buffers.LARGE_TOTAL
) -> tuple[list[list[float]], list[str]]:
    """The tensors of a model after two steps, in which from the one numbered `first` on each rank has added or written
    another number; and what was told of its parameters, which are frozen, or of large buffers, where all have
    more bytes than `total`."""
    rank_buffers.LARGE_TOTAL, rank_buffers.LARGE_SIZE = total, min(total, rank_buffers.LARGE_SIZE)
    mesh = Mesh.create(device=device)
    model = counting().to(device)
    buffers = RankBuffers(model, mesh)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage().partition(" in the passes")[0])  # type: ignore[method-assign]
    logging.getLogger("stepmark").addHandler(handler)
    for step in range(2):
        buffers.begin()
        if step >= first:
            CHANGES[name](model, 10 * step + mesh.data_parallel.rank + 1.0)
        buffers.end()
    return [each.detach().flatten().tolist() for each in model.state_dict().values()], sorted(told)


def test_a_buffer_that_would_not_fit_its_checkpoint_is_refused() -> None:
    model, mesh = counting(), Mesh.create(device="cpu", data_parallel_replicas=2)
    buffers = RankBuffers(model, mesh)
    buffers.begin()
    model.count = torch.zeros(3)
    with pytest.raises(UsageError, match=r"^model: the buffer count gets another shape or dtype"):
        buffers.enter(1)


def test_rows_that_depend_on_who_looks_them_up_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, max_norm=1.0))
    with pytest.raises(UsageError, match=r"^model: 0 has max_norm, by which each of the 2 data parallel ranks"):
        RankBuffers(model, Mesh.create(device="cpu", data_parallel_replicas=2))
    RankBuffers(model, Mesh.create(device="cpu"))


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int16, torch.complex64, torch.float8_e4m3fn])
def test_buffers_of_any_dtype(ranks: Ranks, dtype: torch.dtype) -> None:
    found = ranks.run(of_dtype, str(dtype).removeprefix("torch."), nproc=2, timeout=60).check()
    assert found[0] == found[1]


def of_dtype(dtype: str) -> str:
    mesh, model = Mesh.create(device="cpu"), nn.Linear(2, 2)
    values, others = (torch.tensor(each).to(getattr(torch, dtype)) for each in ([-0.0, 1.0, 0.0], [1.0, 2.0, 3.0]))
    model.register_buffer("kept", torch.zeros(3, dtype=values.dtype))
    buffers = RankBuffers(model, mesh)
    buffers.begin()
    model.kept.copy_(values if mesh.data_parallel.rank == 0 else others)
    buffers.end()
    assert str(model.kept) == str(values)
    return str(model.kept)
