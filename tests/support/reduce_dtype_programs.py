"""Programs for ranks that send each other gradients in bfloat16."""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch import nn

from stepmark import Mesh
from stepmark.parallel.buckets import make_buckets
from stepmark.parallel.gradients.reducer import mean_gradients, sharded_gradients
from stepmark.runtime.collectives import GroupCollectives

ELEMENTS, UNIT = 8, 2.0**-9  # half of bfloat16's distance between 0.5 and 1, and a quarter of that from 1 on


def reduced(zero_1: bool, between_hosts: bool, dtype: str) -> list[float]:
    """Of four ranks, one has gradients of 4, each other one of 4 times UNIT: what this one gets of their mean."""
    mesh = Mesh.create(device="cpu")
    parameter = nn.Parameter(torch.zeros(ELEMENTS))
    named, reduce_dtype = [("weight", parameter)], getattr(torch, dtype)
    with patch.object(GroupCollectives, "_between_hosts", lambda *_: between_hosts):
        if zero_1:
            buckets = make_buckets([named], mesh.data_parallel, 1, mesh.runtime)
            reducer = sharded_gradients(buckets, mesh, reduce_dtype=reduce_dtype)
        else:
            reducer = mean_gradients(named, mesh, accumulation=1, reduce_dtype=reduce_dtype)
        scale = 4.0 if mesh.data_parallel.rank == 3 else 4.0 * UNIT
        (parameter * scale).sum().backward()
        one = torch.ones(())
        (gradient,) = reducer.reduce(one, one).gradients
    assert gradient is not None
    return gradient.tolist()
