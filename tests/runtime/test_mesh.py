"""Meshes of one process, one after the other."""

from __future__ import annotations

import pytest

from tests.support.ranks import Ranks

STAGES, TENSOR, BOTH = {"pipeline_parallel_size": 4}, {"tensor_parallel_size": 4}, {"pipeline_parallel_size": 2}
SUMS = {  # over the pipeline, data parallel ranks, tensor parallel ranks, and the ends of the pipeline, by rank
    "stages": [[6, rank, rank, 3 if rank in (0, 3) else rank] for rank in range(4)],
    "tensor": [[rank, rank, 6, rank, *([1] if rank < 2 else [])] for rank in range(4)],
    "both": [[(2, 4)[rank % 2], (1, 5)[rank // 2], rank, (2, 4)[rank % 2]] for rank in range(4)],
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("xla", marks=pytest.mark.xla)])
def test_every_rank_makes_the_groups_of_a_mesh_or_none_does(ranks: Ranks, device: str) -> None:
    """Also those of a pipeline's ends, in which the stages between them are not, and of replicas, which only a stage
    whose parameters are trained may use."""
    meshes = [STAGES, STAGES, TENSOR, BOTH, STAGES, TENSOR]
    found = ranks.run("tests.support.mesh_programs:sums_of_ranks", meshes, device, nproc=4, timeout=60).check()
    names = ["stages", "stages", "tensor", "both", "stages", "tensor"]
    assert found == [[SUMS[name][rank] for name in names] for rank in range(4)]
