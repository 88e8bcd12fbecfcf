"""The tree in which logical ranks are added, whoever hosts them."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from stepmark.errors import UsageError
from stepmark.parallel.buckets import make_buckets
from stepmark.parallel.gradients.accumulators import BucketAccumulator
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.logical_ranks import ArrivingSums, LogicalRanks, Turn


def words(total: int, processes: int) -> str:
    """The sum as it is written, of processes that add what they host first."""
    parts: dict[range, str] = {}
    for process in range(processes):
        ranks = LogicalRanks(total, processes, process)
        sums: list[str] = []
        for rank, merges in ranks.merges.items():
            sums.append(str(rank))
            for _ in range(merges):
                right, left = sums.pop(), sums.pop()
                sums.append(f"({left}+{right})")
        parts |= dict(zip(ranks.roots[process], sums, strict=True))
    return LogicalRanks(total, processes, 0).sum(parts, lambda one, other: f"({one}+{other})")


@pytest.mark.parametrize("total", range(1, 18))
def test_sum_is_the_same_on_any_number_of_processes(total: int) -> None:
    assert {words(total, processes) for processes in range(1, total + 1)} == {words(total, total)}


def test_tree() -> None:
    assert words(7, 3) == "(((0+1)+(2+3))+((4+5)+6))"


@pytest.mark.parametrize(("total", "processes"), [(8, 5), (7, 3), (3, 2), (5, 5), (9, 1), (64, 7)])
def test_processes_host_every_rank_once(total: int, processes: int) -> None:
    hosted = [LogicalRanks(total, processes, process).own for process in range(processes)]
    assert [rank for each in hosted for rank in each] == list(range(total))
    sizes = {len(each) for each in hosted}
    assert max(sizes) - min(sizes) <= 1
    assert len(hosted[0]) == max(sizes)


def arrived(total: int, processes: int) -> tuple[str, int]:
    """The sum as it is written, of what processes send in turns, and how many values were kept between these."""
    sums, kept = ArrivingSums[str](total, lambda *pair: f"({'+'.join(sorted(pair, key=first_of))})"), 0
    ranks = LogicalRanks(total, processes, 0)
    for place in range(ranks.most):
        turn = Turn(ranks, place)
        assert turn.last == (place == ranks.most - 1)
        for rank in turn.hosts.values():
            sums.arrive(rank, str(rank))
        kept = max(kept, len(sums._parts))
    return sums.take(), kept


def first_of(words: str) -> int:
    return int(re.findall(r"\d+", words)[0])


@pytest.mark.parametrize("total", range(1, 18))
def test_what_arrives_in_turns_is_added_in_the_same_way(total: int) -> None:
    found = {processes: arrived(total, processes) for processes in range(1, total + 1)}
    assert {words for words, _ in found.values()} == {found[total][0]}
    assert sorted(map(int, re.findall(r"\d+", found[1][0]))) == list(range(total))


def test_order_of_what_arrives_in_turns() -> None:
    assert arrived(7, 7)[0] == "(((0+4)+(2+6))+((1+5)+3))"
    assert arrived(8, 2)[1] == 2


def test_more_processes_than_ranks_are_refused_with_the_number_that_works() -> None:
    message = "data_parallel_replicas: 2 cannot be divided over 3 data parallel processes, of which each needs one or "
    with pytest.raises(UsageError, match=re.escape(f"{message}more; start at most 2 of them")):
        LogicalRanks.of(2, 3, 0)


def summed(leaves: list[Tensor], processes: int, sent: torch.dtype) -> Tensor:
    parts: dict[range, Tensor] = {}
    mesh, parameter = Mesh.create(device="cpu"), nn.Parameter(torch.zeros_like(leaves[0]))
    for process in range(processes):
        ranks = LogicalRanks(len(leaves), processes, process)
        sums = BucketAccumulator(make_buckets([[("p", parameter)]], mesh), mesh.runtime, ranks, lambda _: sent)
        for _ in range(2):  # in the second step with the memory of the first
            sums.reset()
            for rank in ranks.own:
                (parameter * leaves[rank]).sum().backward()
                if rank != ranks.own[-1]:
                    sums.end_rank()
            roots = sums.roots(0)
        parts |= dict(zip(ranks.roots[process], [root.clone() for root in roots], strict=True))
    return LogicalRanks(len(leaves), processes, 0).sum(parts, torch.add)


@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16])
def test_partial_sums_have_the_same_bits_on_any_number_of_processes(sent: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    leaves = [torch.randn(1000, generator=generator) * 10**-index for index in range(8)]
    expected = summed(leaves, 8, sent)
    for processes in range(1, 8):
        assert torch.equal(summed(leaves, processes, sent), expected)
    exact = torch.stack([leaf.to(sent).double() for leaf in leaves]).sum(0)
    torch.testing.assert_close(expected.double(), exact, rtol=1e-6, atol=1e-7)
