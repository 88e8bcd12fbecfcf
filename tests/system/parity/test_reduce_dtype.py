"""Gradients that data parallel ranks send each other in bfloat16, and add in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from stepmark import Mesh, TrainingArguments
from stepmark.config.contradictions import reduction_contradictions
from stepmark.errors import UsageError
from stepmark.parallel.optimizer.replicated import Replicated
from stepmark.parallel.optimizer.zero1_shards import FlatShards
from stepmark.runtime.collectives import GroupCollectives
from stepmark.trainer.run import check_device
from tests.support.programs import logged
from tests.support.ranks import Ranks


@pytest.mark.parametrize(("between_hosts", "in_order"), [(True, True), (False, True), (False, False)])
def test_sums_are_in_float32(ranks: Ranks, between_hosts: bool, in_order: bool) -> None:
    """Added in bfloat16, the small ones would each be lost. ZeRO-1 keeps the sum, plain form rounds it once."""
    how = between_hosts, in_order
    shards = ranks.run(reduced, True, *how, "bfloat16", nproc=4).check()
    assert shards == [[1 + 3 * UNIT] * (ELEMENTS // 4)] * 4
    complete = ranks.run(reduced, False, *how, "bfloat16", nproc=4).check()
    assert complete == [[1 + 4 * UNIT] * ELEMENTS] * 4
    assert torch.tensor(1 + 3 * UNIT).to(torch.bfloat16) == 1 + 4 * UNIT
    assert ranks.run(reduced, False, *how, "float32", nproc=4).check() == [[1 + 3 * UNIT] * ELEMENTS] * 4


@pytest.mark.parametrize("zero_1", [False, pytest.param(True, marks=pytest.mark.prove)])
def test_a_run_learns_alike(ranks: Ranks, tmp_path: Path, zero_1: bool) -> None:
    common = {"device": "cpu", "dropout": 0.0, "zero_1": zero_1}
    more = {"gradient_accumulation_steps": 2, "learning_rate": 1e-2}

    def run(name: str, **options: Any) -> tuple[dict[int, list[float]], list[Any]]:
        told = {**common, **more, **options, "output_dir": str(tmp_path / name)}
        found = ranks.run("tests.support.programs:train", told, nproc=2)
        return logged(tmp_path / name)["losses"], [each and each["weights"] for each in found.results]

    exact, _ = run("exact")
    rounded, weights = run("rounded", reduce_dtype="bfloat16")
    assert weights[0] == weights[1]
    assert rounded != exact
    assert len(rounded) == 8
    for step, (loss, norm) in exact.items():
        assert rounded[step] == [pytest.approx(loss, rel=2e-3), pytest.approx(norm, rel=2e-2)]


def test_what_is_refused() -> None:
    """By the arguments, or where the device is not known before, by the device."""
    assert not [*reduction_contradictions("float32", "xla")]
    TrainingArguments(device="xla", reduce_dtype="float32")
    with pytest.raises(UsageError, match="^reduce_dtype: xla "):
        TrainingArguments(device="xla", reduce_dtype="bfloat16")
    with pytest.raises(UsageError, match="^reduce_dtype: xla "):
        check_device(TrainingArguments(reduce_dtype="bfloat16"), "xla")
    with pytest.raises(UsageError, match="^reduce_dtype: 'bf16' "):
        TrainingArguments(reduce_dtype="bf16")


# What ranks run


ELEMENTS, UNIT = 256, 2.0**-9  # half of bfloat16's distance between 0.5 and 1, and a quarter of that from 1 on


def reduced(zero_1: bool, between_hosts: bool, in_order: bool, dtype: str) -> list[float]:
    """Of four ranks, one has gradients of 1, each other one of UNIT: what this one gets of their sum."""
    mesh = Mesh.create(device="cpu")
    mesh.ranks = replace(mesh.ranks, fixed=in_order)
    parameter = nn.Parameter(torch.zeros(ELEMENTS))
    with patch.object(GroupCollectives, "_between_hosts", lambda *_: between_hosts):
        groups = [{"params": [("weight", parameter)]}]
        distribution = FlatShards(groups, mesh) if zero_1 else Replicated(groups, mesh.runtime)
        reducer = distribution.gradients(mesh, accumulation=1, reduce_dtype=getattr(torch, dtype), on_arrival=False)
        scale = 1.0 if mesh.data_parallel.rank == 3 else UNIT
        (parameter * scale).sum().backward()
        one = torch.ones(())
        (gradient,) = reducer.reduce(one, one).gradients
    assert gradient is not None
    return gradient.tolist()
