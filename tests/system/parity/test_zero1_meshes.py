"""ZeRO-1 together with tensor and sequence parallelism, on 2 data parallel by 2 tensor parallel ranks."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.support.mesh_parity import MODELS, PROGRAM, compare
from tests.support.ranks import Ranks
from tests.support.replica_threads import replica_environment

MESH = {"tp": 2, "zero_1": True}


def cases(names: list[str], steps: int, combined: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"model": MODELS[name], "steps": steps, **MESH, **more} for name, more in product(names, combined)]


@pytest.mark.prove
def test_against_the_same_mesh_without_zero_1(ranks: Ranks) -> None:
    """With dropout, whose random numbers depend on the mesh, and with bf16 parameters, whose fp32 masters are
    sharded."""
    dropout = {"kind": "gpt2", "dropout": 0.1}
    combined = [{"model": dropout}, {"model": dropout, "sequence": True, "accumulation": 2}]
    combined += [{"model": dropout, "sequence": True, "checkpointing": True}, {"model": dropout, "tp": 1}]
    whole = [{"steps": 20, "tp": 2, **more} for more in combined]
    rounded = [{"model": MODELS["llama"], "steps": 20, "tp": 2, "bf16": True, "sequence": True}]
    cut = [{**each, "zero_1": True} for each in whole + rounded]
    found = ranks.run(PROGRAM, "cpu", [*whole, *rounded, *cut, *cut[:2]], nproc=4, timeout=1200).check()
    half = len(cut)
    for each in found:
        for options, ours, theirs in zip(cut, each[half : 2 * half], each[:half], strict=True):
            tolerance = 1e-2 if options.get("bf16") else 1e-5
            for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
                assert one == pytest.approx(other, rel=tolerance), (options, step)
        assert each[2 * half :] == each[half : half + 2]  # the same numbers are drawn again


def test_dropout_of_replicated_activations_is_that_of_any_tensor_parallel_size(ranks: Ranks) -> None:
    options = [{"model": {"kind": "gpt2", "dropout": 0.1, "attn_pdrop": 0.0}, "steps": 6}]
    two = ranks.run(PROGRAM, "cpu", [{**each, "tp": 2} for each in options], nproc=2).check()
    four = ranks.run(PROGRAM, "cpu", [{**each, "tp": 4} for each in options], nproc=4).check()
    for ours, theirs in zip(four[0][0], two[0][0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_every_rank_has_its_share_of_the_state(ranks: Ranks) -> None:
    """Within three percent, for a model with indivisible sizes, in float32 and in bfloat16; masters included. Shares
    are multiples of 64 elements."""
    program = "tests.support.models:state_bytes"
    flat = [{"model": MODELS["gpt2"], "zero_1": True, "bf16": bf16} for bf16 in (False, True)]
    cut = [{**options, "tp": 2} for options in flat]
    (whole,) = ranks.run(program, flat).check()
    halves = ranks.run(program, cut, nproc=2).check()
    for rank, found in enumerate(ranks.run(program, [*flat, *cut], nproc=4).check()):
        assert found[:2] == pytest.approx([size / 4 for size in whole], rel=0.03)
        assert found[2:] == pytest.approx([size / 2 for size in halves[rank % 2]], rel=0.03)


@pytest.mark.xla
def test_in_the_graph(ranks: Ranks) -> None:
    compare(ranks, "threads", 4, cases(["llama-one-kv-head"], 3, [{"sequence": True, "accumulation": 2}]))


@pytest.mark.xla
def test_all_ranks_run_the_same_graphs_and_saving_adds_none(ranks: Ranks) -> None:
    """Sequence parallelism has 10 all-gathers, 9 reduce-scatters and 3 all-reduces (see distributed/test_parallel.py).
    ZeRO-1 adds one of each of the first two for its two buckets: tensors that are cut, and such that are not. The
    latter's gradients are summed over the tensor parallel ranks, and so is the norm, which comes from all ranks."""
    program = "tests.system.distributed.test_parallel:zero_1_graphs"
    (found,) = ranks.run(program, 4, environment=replica_environment(4), timeout=400).check()
    assert all(each == found[0] for each in found)
    (step,) = found[0]["graphs"]
    assert {kind: step[kind] for kind in ("all-gather", "reduce-scatter", "all-reduce")} == {
        "all-gather": 10 + 2,
        "reduce-scatter": 9 + 2,
        "all-reduce": 3 + 1 + 2,
    }
    assert found[0]["compilations"] == [1] * 5
