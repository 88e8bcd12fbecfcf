"""What the schedules of pipelines promise, measured: how long ranks wait, and how many activations they keep."""

from __future__ import annotations

from typing import Any

import pytest

from stepmark.parallel.pipeline.schedules import ideal_idle_share
from tests.support.ranks import Ranks

PROGRAMS = "tests.support.pipeline_programs:"
INTERLEAVED = {"schedule": "interleaved", "chunks": 2}


def test_1f1b_keeps_as_many_activations_as_there_are_stages(ranks: Ranks) -> None:
    """From as many micro-batches as stages on the first rank keeps no more; gpipe keeps those of all."""
    options: dict[str, Any] = {"model": {"kind": "llama", "num_hidden_layers": 4}, "pp": 2}
    counts = [2, 4, 8]
    flat = ranks.run(PROGRAMS + "kept_bytes", options, counts, nproc=2).check()
    for rank, kept in enumerate(flat):
        assert kept[2] <= 1.02 * kept[0], rank
    growing = ranks.run(PROGRAMS + "kept_bytes", {**options, "schedule": "gpipe"}, counts, nproc=2).check()
    assert growing[0][0] == pytest.approx(flat[0][0], rel=0.02)
    assert growing[0][2] > 3.5 * growing[0][0]


def test_gradient_checkpointing_keeps_what_a_stage_starts_from(ranks: Ranks) -> None:
    """Even where all micro-batches are in flight, autograd keeps one of them at a time."""
    options = {"model": {"kind": "llama", "num_hidden_layers": 4}, "pp": 2, "schedule": "gpipe", "checkpointing": True}
    for rank, kept in enumerate(ranks.run(PROGRAMS + "kept_bytes", options, [2, 8], nproc=2).check()):
        assert kept[1] <= 1.02 * kept[0], rank


@pytest.mark.parametrize(("schedule", "last"), [("1f1b", 2), ("gpipe", 3)])
def test_gradient_checkpointing_repeats_what_the_balance_counts(ranks: Ranks, schedule: str, last: int) -> None:
    """Forward passes of a layer for each of 4 micro-batches; see parallel/pipeline/balance.py."""
    options: dict[str, Any] = {"model": {"kind": "llama", "num_hidden_layers": 4}, "pp": 2, "checkpointing": True}
    options |= {"schedule": schedule, "batch": 4, "accumulation": 4}
    calls = ranks.run(PROGRAMS + "forward_passes", options, nproc=2).check()
    assert calls == [[3 * 4, 0], [last * 4, (last - 1) * 4]]


@pytest.mark.prove
@pytest.mark.parametrize("micro_batches", [4, 8])
@pytest.mark.parametrize(
    ("stages", "schedule"),
    [
        (2, {"schedule": "1f1b"}),
        (4, {"schedule": "1f1b"}),
        (4, {"schedule": "gpipe"}),
        (2, INTERLEAVED),
        (4, INTERLEAVED),
    ],
    ids=["2 1f1b", "4 1f1b", "4 gpipe", "2 interleaved", "4 interleaved"],
)
def test_ranks_wait_as_long_as_theory_says(
    ranks: Ranks, stages: int, schedule: dict[str, Any], micro_batches: int
) -> None:
    """Stages of layers that sleep a known time, beside which what they compute is little."""
    chunks, layers = schedule.get("chunks", 1), 8
    forward, backward = 0.2 * stages / layers, 0.4 * stages / layers
    options = {
        "model": {"kind": "llama", "num_hidden_layers": layers},
        "pp": stages,
        "layers": [layers // stages // chunks] * (stages * chunks),
        "batch": micro_batches,
        "accumulation": micro_batches,
        **schedule,
    }
    shares = ranks.run(PROGRAMS + "idle_share", options, forward, backward, nproc=stages, timeout=300).check()
    idle = sum(shares) / stages
    expected = ideal_idle_share(stages, micro_batches, chunks)
    print(f"{stages} stages, {micro_batches} micro-batches, {schedule}: idle {idle:.3f}, in theory {expected:.3f}")
    assert idle == pytest.approx(expected, abs=0.05)
